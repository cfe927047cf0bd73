"""A `train()` that raises leaves its CUDA-graph wrapper around `optimizer.step`.

Symptom:
    With `--optimizer-cuda-graph` every `train()` that raised leaves one more
    `OptimizerCudaGraphWrapper` on the optimizer; the next call wraps that again. Each layer counts
    its own steps towards the capture, and a window between two calls is captured or replayed by
    mistake.

Cause:
    `train()` assigns `optimizer.step` on entry and deletes it only after its loop. That also
    deletes a `step` which the caller had set on the optimizer.

Affects:
    0.17 to 0.19, where the option exists. What the patch does: when `train()` ends, even by an
    exception, `optimizer.step` is what it was before. Tested without a graph, because the CPU has
    no CUDA: with a call that raises before its first step.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` removes the wrapper in a `finally`. `upstream/optimizer-step-rewrapped` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from ._case import (
    Fault,
    Original,
    Patch,
    address,
    arguments,
    interrupt,
    no_body_has,
    program,
    target,
)


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train`, and restore `optimizer.step`, even if it raises."""
    optimizer = arguments(original, args, kwargs)["optimizer"]
    if optimizer is None:  # Megatron's inference-only mode
        return original(*args, **kwargs)
    attributes = vars(optimizer)
    step = attributes.get("step")
    try:
        return original(*args, **kwargs)
    finally:
        if step is not None:
            optimizer.step = step
        elif "step" in attributes:
            del optimizer.step


def reproduce() -> None:
    """Run `train()` with `--optimizer-cuda-graph`, and raise in its first microbatch.
    On stock Megatron `optimizer.step` stays wrapped.
    """
    running = program(["--optimizer-cuda-graph"])
    interrupt(running)
    if "step" in vars(running.optimizer):
        raise Fault(f"optimizer.step is left as {running.optimizer.step}")


PATCH = Patch(
    "a raising train() with --optimizer-cuda-graph leaves its wrapper on optimizer.step",
    target("training.train", train, "del optimizer.step"),
    since="0.17",
    # As on main for three days of March 2026, when the option was reverted.
    fixed_when=no_body_has("OptimizerCudaGraphWrapper"),
    fixed_by=((address("training.train_step"), "optimizer_step or optimizer.step"),),
    groups=("train-again",),
    ranks=1,
)
