"""`train()` unsets `config.param_sync_func` and does not restore it when it leaves early.

Symptom:
    After a `train()` without a successful iteration (no iterations left, an exit condition, only
    skipped steps, an exception) `config.param_sync_func` is None. With align_param_gather the
    schedules then no longer dispatch the parameter gathers, and pre-hooks wait for gathers that
    were never started.

Cause:
    `train()` unsets the function on entry, "temporarily", and restores it only after the first
    iteration that stepped, without a `finally`.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: when `train()` ends, even by an exception, a `param_sync_func` that it unset is
    restored: the caller's own, or with align_param_gather the chunks' `start_param_sync`, as
    upstream sets it.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` restores the function in a `finally`. `upstream/param-sync-func-lost` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, arguments, no_body_has, program, target


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train`, and restore `param_sync_func`, even if it raises."""
    from megatron.training import get_args

    call = arguments(original, args, kwargs)
    config, options = call["config"], get_args()
    sync_func = config.param_sync_func
    if options.overlap_param_gather and options.align_param_gather:
        functions = [chunk.start_param_sync for chunk in call["model"]]
        sync_func = functions[0] if len(functions) == 1 else functions
    try:
        return original(*args, **kwargs)
    finally:
        if config.param_sync_func is None:
            config.param_sync_func = sync_func


def reproduce() -> None:
    """Run a `train()` without iterations, with `config.param_sync_func` set by the caller.
    On stock Megatron `config.param_sync_func` is None afterwards.
    """
    running = program(["--overlap-grad-reduce", "--overlap-param-gather"])
    running.config.param_sync_func = running.chunks[0].start_param_sync
    running.train(0)
    if running.config.param_sync_func is None:
        raise Fault("config.param_sync_func is None after train()")


PATCH = Patch(
    "train() loses config.param_sync_func when it ends before its second iteration",
    target(
        "training.train",
        train,
        "config.param_sync_func = None",
        "config.param_sync_func = param_sync_func",
        "config.param_sync_func = [model_chunk.start_param_sync for model_chunk in model]",
    ),
    groups=("train-again", "overlap"),
    fixed_when=no_body_has("config.param_sync_func = None"),
    fixed_by=(
        (
            address("training.train"),
            "should_disable_forward_pre_hook(args) and not pre_hook_enabled",
        ),
    ),
)
