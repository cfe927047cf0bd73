"""A second `train()` with overlap_grad_reduce asserts on the `no_sync_func` of the first.

Symptom:
    `AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None; a custom
    no_sync_func is not supported when overlapping grad-reduce`, from the second call of
    `megatron.training.training.train` on. It also happens with virtual pipeline stages, whose
    chunks share one config.

Cause:
    `train()` installs the chunks' own `no_sync` in `config.no_sync_func` and never removes it; its
    next call takes it for a custom function.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: before upstream's check it clears a `no_sync_func` that is the bound `no_sync`
    of these very chunks. A custom function still ends in the assertion. `grad_sync_func` and
    `param_sync_func` need no clearing: upstream overwrites them without a check.

Upstream:
    https://github.com/THUDM/slime/pull/1857 has the same repair for slime's copy of the loop.

Remove when:
    `train()` accepts its own `no_sync`, or restores the config when it leaves.
    `upstream/no-sync-func-reentry` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.ddp import is_no_sync_of

from ._case import Original, Patch, address, arguments, no_body_has, program, target


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train`, but first clear a `config.no_sync_func` that an earlier call set."""
    call = arguments(original, args, kwargs)
    config = call["config"]
    installed = config.no_sync_func
    if not is_no_sync_of(installed, call["model"]):
        return original(*args, **kwargs)
    config.no_sync_func = None
    try:
        return original(*args, **kwargs)
    finally:
        if config.no_sync_func is None:  # train() raised before it installed one
            config.no_sync_func = installed


def reproduce() -> None:
    """Run `train()` twice with overlap_grad_reduce on two data-parallel ranks.
    On stock Megatron the second call asserts on `config.no_sync_func`.
    """
    from megatron.training import get_timers

    running = program(["--overlap-grad-reduce"])
    running.train(1)
    # Upstream also asserts on this timer, see `train-interval-timer`.
    get_timers()._timers["interval-time"].reset()
    running.train(1)


PATCH = Patch(
    "a second train() with overlap_grad_reduce asserts on config.no_sync_func",
    target(
        "training.train",
        train,
        "config.no_sync_func is None",
        "config.no_sync_func = [model_chunk.no_sync for model_chunk in model]",
    ),
    groups=("train-again", "overlap"),
    fixed_when=no_body_has("config.no_sync_func"),
    fixed_by=(
        (
            address("training.train"),
            "config.no_sync_func in (None, model[0].no_sync, [chunk.no_sync for chunk in model])",
        ),
    ),
    stock_error=r"AssertionError: .*config\.no_sync_func must be None",
)
