"""A forward-only interleaved window leaves a different virtual pipeline rank than training.

Symptom:
    `parallel_state.is_pipeline_first_stage()` and `is_pipeline_last_stage()` return different
    results after a log-prob pass than after a training window: for example, a rank of the last
    stage counts as the last virtual stage only after forward-only windows.

Cause:
    The schedule keeps the virtual stage in a global, and leaves the stage that ran last in it: the
    first chunk's after backward passes, the last chunk's after forward passes.

Affects:
    0.12, the last release whose schedule uses the global. What the patch does: after a
    forward-only window, and after any window that raised, the virtual rank is what it was before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.3/megatron/core/pipeline_parallel/schedules.py

Remove when:
    0.12 is no longer supported: from 0.13 on the stage is an argument.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, bench, no_body_has, schedule_targets


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run the interleaved schedule; if it is forward-only or raises, restore the virtual rank."""
    from megatron.core import parallel_state

    virtual_rank = parallel_state.get_virtual_pipeline_model_parallel_rank()
    completed = False
    try:
        result = original(*args, **kwargs)
        completed = True
        return result
    finally:
        if kwargs.get("forward_only", False) or not completed:
            parallel_state.set_virtual_pipeline_model_parallel_rank(virtual_rank)


def reproduce() -> None:
    """Run a training window, then a forward-only one, with virtual pipeline stages.
    On stock Megatron the virtual pipeline rank differs afterwards.
    """
    from megatron.core import parallel_state

    model = bench(pp=2, vpp=2)
    model.forward_backward(4, data_seed=0)
    before_rank = parallel_state.get_virtual_pipeline_model_parallel_rank()
    model.forward_backward(4, data_seed=0, forward_only=True)
    after_rank = parallel_state.get_virtual_pipeline_model_parallel_rank()
    if after_rank != before_rank:
        raise Fault(
            f"virtual rank {after_rank} after a forward-only window, {before_rank} before it"
        )


PATCH = Patch(
    "a forward-only interleaved window leaves another virtual pipeline rank",
    *schedule_targets(schedule, "forward_backward_pipelining_with_interleaving"),
    before="0.13",
    fixed_when=no_body_has("parallel_state.set_virtual_pipeline_model_parallel_rank(0)"),
)
