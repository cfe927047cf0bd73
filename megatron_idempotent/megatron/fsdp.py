"""Resets a chunk in the first version of Megatron-FSDP.

The chunk's wrapper has the `MegatronFSDP` that does the work as `module`.
"""

from __future__ import annotations

from typing import Any


def is_wrapped(chunk: Any) -> bool:
    """Return whether a chunk is wrapped by the first version of Megatron-FSDP."""
    return hasattr(getattr(chunk, "module", None), "grad_reduce_pipeline")


def was_interrupted(fsdp: Any) -> bool:
    """Return whether a backward of a `MegatronFSDP` is unfinished, or has reductions in flight."""
    reductions = fsdp.grad_reduce_pipeline
    return bool(
        fsdp._root_pre_backward_hook_issued
        or reductions.grad_reduce_queue
        or any(reductions.bucket_grad_ready_params)
    )


def start_over(fsdp: Any) -> None:
    """Drop the state that an interrupted backward has left in a `MegatronFSDP`.
    It waits for reductions first. Call it before gradients are zeroed.
    """
    reductions = fsdp.grad_reduce_pipeline
    # First, because reductions in flight write into the gradients that are zeroed next.
    reductions.wait_for_previous_grad_reduce(0)
    for ready in reductions.bucket_grad_ready_params:
        ready.clear()
    reductions.reset()
    for parameter in fsdp.raw_param.values():
        parameter.grad = None
    fsdp._params_require_handle_grad = set()
    fsdp._root_pre_backward_hook_issued = False
    fsdp.microbatch_count = 0
    for module in fsdp.module.modules():
        state = getattr(module, "_training_state", None)
        if state is not None:
            module._training_state = type(state).IDLE
