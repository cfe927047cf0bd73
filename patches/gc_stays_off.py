"""`train()` with manual garbage collection leaves Python's collector off.

Symptom:
    With `--manual-gc`, `gc.isenabled()` is False after `train()` has returned or raised. Garbage
    from between two calls (rollouts, log-probs, a framework's server) is never collected: memory
    grows.

Cause:
    `train()` calls `gc.disable()` and nothing calls `gc.enable()`.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: if the collector was on before `train()`, it is on afterwards. If a framework
    has turned it off itself, it stays off.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` turns the collector on again when it leaves. `upstream/gc-stays-off` has the repair.
"""

from __future__ import annotations

import gc
from typing import Any

from ._case import Fault, Original, Patch, a_body_has, program, target


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train`, then enable Python's garbage collector if it was enabled before."""
    was_on = gc.isenabled()
    try:
        return original(*args, **kwargs)
    finally:
        if was_on:
            gc.enable()


def reproduce() -> None:
    """Run `train()` with `--manual-gc`; on stock Megatron garbage collection stays off."""
    running = program(["--manual-gc"])
    running.train(1)
    if not gc.isenabled():
        raise Fault("garbage collection is off after train()")


PATCH = Patch(
    "train() with --manual-gc leaves garbage collection off for good",
    target("training.train", train, "gc.disable()"),
    groups=("train-again",),
    fixed_when=a_body_has("gc.enable()"),
    ranks=1,
)
