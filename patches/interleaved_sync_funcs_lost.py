"""A forward-only interleaved window that raises loses the config's synchronisation functions.

Symptom:
    After a forward-only window over virtual pipeline stages that raised (a bad sample, or
    upstream's own `ValueError` for too few microbatches), `config.grad_sync_func` and
    `config.param_sync_func` are None. Later training windows dispatch no aligned reductions and
    gathers any more.

Cause:
    `forward_backward_pipelining_with_interleaving` sets both to None for a forward-only pass and
    restores them at its end, without a `finally`.

Affects:
    Every release. What the patch does: if a forward-only window raises, both have their earlier
    values.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py

Remove when:
    the schedule restores both in a `finally`. `upstream/interleaved-sync-funcs-lost` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from ._case import Fault, Original, Patch, address, bench, schedule_targets


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run the interleaved schedule; if a forward-only call raises, restore the config's functions.
    They are `grad_sync_func` and `param_sync_func`.
    """
    if not kwargs.get("forward_only", False):
        return original(*args, **kwargs)
    config = schedules.config_of(kwargs["model"])
    functions = config.grad_sync_func, config.param_sync_func
    try:
        return original(*args, **kwargs)
    except BaseException:
        config.grad_sync_func, config.param_sync_func = functions
        raise


def reproduce() -> None:
    """Run a forward-only interleaved call with too few microbatches, which upstream refuses.
    On stock Megatron `config.grad_sync_func` and `param_sync_func` are None afterwards.
    """
    model = bench(pp=2, vpp=2, overlap_param_gather=True, align=True)
    try:
        model.forward_backward(1, data_seed=0, forward_only=True)
    except ValueError:
        config = model.config
        lost = [n for n in ("grad_sync_func", "param_sync_func") if getattr(config, n) is None]
        if lost:
            raise Fault(f"the window lost {' and '.join(lost)}") from None


PATCH = Patch(
    "a forward-only interleaved window that raises loses grad_sync_func, param_sync_func",
    *schedule_targets(schedule, "forward_backward_pipelining_with_interleaving"),
    groups=("overlap", "abort"),
    fixed_by=(
        (
            address("schedules.forward_backward_pipelining_with_interleaving"),
            "config.param_sync_func is not None and not forward_only",
        ),
    ),
)
