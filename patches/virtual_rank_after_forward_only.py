"""A forward-only interleaved window leaves another virtual pipeline rank than training does.

Symptom:
    `parallel_state.is_pipeline_first_stage()` and `is_pipeline_last_stage()` answer differently
    after a log-prob pass than after a training window: a rank of the last stage, say, takes itself
    for the last virtual stage only after forward-only windows.

Cause:
    The schedule keeps the virtual stage in a global, and leaves in it the last one it has run: the
    first chunk's after backward passes, the last chunk's after forward passes.

Affects:
    0.12, the last release with the global at work in the schedule. What the patch does: after a
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
    """Run the interleaved schedule; if forward-only, or if it raises, puts the rank back."""
    from megatron.core import parallel_state

    before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    completed = False
    try:
        result = original(*args, **kwargs)
        completed = True
        return result
    finally:
        if kwargs.get("forward_only", False) or not completed:
            parallel_state.set_virtual_pipeline_model_parallel_rank(before)


def reproduce() -> None:
    """Run a training window, then a forward-only one."""
    from megatron.core import parallel_state

    model = bench(pp=2, vpp=2)
    model.forward_backward(4, data_seed=0)
    before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    model.forward_backward(4, data_seed=0, forward_only=True)
    after = parallel_state.get_virtual_pipeline_model_parallel_rank()
    if after != before:
        raise Fault(f"virtual rank {after} after a forward-only window, {before} before it")


PATCH = Patch(
    "a forward-only interleaved window leaves another virtual pipeline rank",
    *schedule_targets(schedule, "forward_backward_pipelining_with_interleaving"),
    before="0.13",
    fixed_when=no_body_has("parallel_state.set_virtual_pipeline_model_parallel_rank(0)"),
)
