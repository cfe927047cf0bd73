"""A `train()` that raises leaves its CUDA-graph wrapper around `optimizer.step`.

Symptom:
    With `--optimizer-cuda-graph` every `train()` that raised leaves one more
    `OptimizerCudaGraphWrapper` on the optimizer; the next call wraps that. Each layer counts steps
    of its own towards the capture, and a window between two calls is captured or replayed although
    nobody asked for it.

Cause:
    `train()` assigns `optimizer.step` on entry and deletes it only after its loop. That also
    deletes a `step` which the caller had set on the optimizer.

Affects:
    0.17 to 0.19, where the option exists. What the patch does: however `train()` ends,
    `optimizer.step` is what it was before. Seen here without a graph, for want of CUDA: on a call
    that raises before its first step.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` takes the wrapper away in a `finally`.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, arguments, interrupt, no_body_has, program, target


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train`, and put `optimizer.step` back also if it raises."""
    optimizer = arguments(original, args, kwargs)["optimizer"]
    if optimizer is None:  # Megatron's inference-only mode
        return original(*args, **kwargs)
    own = vars(optimizer)
    before = own.get("step")
    try:
        return original(*args, **kwargs)
    finally:
        if before is not None:
            optimizer.step = before
        elif "step" in own:
            del optimizer.step


def reproduce() -> None:
    """Run a call that raises in its first microbatch."""
    running = program(["--optimizer-cuda-graph"])
    interrupt(running)
    if "step" in vars(running.optimizer):
        raise Fault(f"optimizer.step is left as {running.optimizer.step}")


PATCH = Patch(
    "a raising train() with --optimizer-cuda-graph leaves its wrapper on optimizer.step",
    target("training.train", train, "del optimizer.step"),
    since="0.17",
    # As on main for three days of March 2026, which took the option back.
    fixed_when=no_body_has("OptimizerCudaGraphWrapper"),
    groups=("train-again",),
    ranks=1,
)
