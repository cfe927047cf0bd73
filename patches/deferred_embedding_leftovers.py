"""With a deferred embedding gradient, log-probability passes pile up activations.

Symptom:
    With `defer_embedding_wgrad_compute`, each forward-only window leaves one activation per
    microbatch on the last pipeline stage until the next training window, and takes them from
    `wgrad_deferral_limit`. After an aborted window the next one raises `AssertionError: Length of
    activation and gradient buffers need to be equal!`, for ever.

Cause:
    The output layer also keeps its inputs in forward-only passes. A window that finalizes clears
    the list of inputs at its start, but not the list of output gradients.

Affects:
    Every release. What the patch does: a forward-only window, and one that raises, drop what they
    added to either list; a window that finalizes starts with both empty. Entries that a caller
    without `finalize_model_grads_func` drains itself stay.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `clear_embedding_activation_buffer`.

Remove when:
    the output layer keeps no inputs in passes without gradients, and both lists are cleared.
    `upstream/deferred-embedding-leftovers` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from . import _deferred_embedding
from ._case import PIPELINED, Fault, Original, Patch, address, schedule_targets


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule; if it is forward-only or raises, drop what it added to the deferred lists.
    These hold the activations and output gradients of the deferred embedding gradient.
    """
    model, forward_only = kwargs["model"], kwargs.get("forward_only", False)
    lists = schedules.buffers(model)
    if lists is None:
        return original(*args, **kwargs)
    config = schedules.config_of(model)
    if config.finalize_model_grads_func is not None and not forward_only:
        for items in lists:
            items.clear()
    lengths = [len(items) for items in lists]
    complete = False
    try:
        result = original(*args, **kwargs)
        complete = not forward_only
    finally:
        if not complete:
            for items, length in zip(lists, lengths, strict=True):
                del items[length:]
    return result


def reproduce() -> None:
    """Run three forward-only windows of two microbatches with a deferred embedding gradient.
    On stock Megatron an activation per microbatch stays in the list of the last stage.
    """
    model = _deferred_embedding.build()
    for data_seed in range(3):
        model.forward_backward(2, data_seed=data_seed, forward_only=True)
    lists = schedules.buffers(model.chunks)
    if lists is not None and lists[0]:
        raise Fault(f"{len(lists[0])} activations kept after forward-only windows")


PATCH = Patch(
    "forward-only and aborted windows leave activations for the deferred embedding",
    *schedule_targets(schedule, *PIPELINED),
    groups=("abort", "deferred-embedding"),
    fixed_by=(
        (
            address("schedules.clear_embedding_activation_buffer"),
            "embedding_module.grad_output_buffer.clear()",
        ),
    ),
    loudness="both",
)
