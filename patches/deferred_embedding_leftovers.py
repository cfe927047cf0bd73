"""With a deferred embedding gradient, log-probability passes pile up activations.

Symptom:
    With `defer_embedding_wgrad_compute`, each forward-only window leaves one activation per
    microbatch on the last pipeline stage until the next training window, and takes them from
    `wgrad_deferral_limit`. After an aborted window the next one raises `AssertionError: Length of
    activation and gradient buffers need to be equal!`, for ever.

Cause:
    The output layer keeps its inputs in forward-only passes too. A window that finalizes clears
    that list at its start, but not the one with the output gradients.

Affects:
    Every release. What the patch does: a forward-only window, and one that raises, drop what they
    added to either list; a window that finalizes starts with both empty. What a caller without
    `finalize_model_grads_func` means to drain by itself stays.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/schedules.py,
    `clear_embedding_activation_buffer`.

Remove when:
    the output layer keeps nothing without gradients, and both lists are cleared.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from . import _deferred_embedding
from ._case import PIPELINED, Fault, Original, Patch, schedule_targets


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule; if it is forward-only or raises, drops what it added to the lists."""
    model, forward_only = kwargs["model"], kwargs.get("forward_only", False)
    kept = schedules.buffers(model)
    if kept is None:
        return original(*args, **kwargs)
    config = schedules.config_of(model)
    if config.finalize_model_grads_func is not None and not forward_only:
        for items in kept:
            items.clear()
    lengths = [len(items) for items in kept]
    complete = False
    try:
        result = original(*args, **kwargs)
        complete = not forward_only
    finally:
        if not complete:
            for items, length in zip(kept, lengths, strict=True):
                del items[length:]
    return result


def reproduce() -> None:
    """Run three forward-only windows of two microbatches."""
    model = _deferred_embedding.build()
    for data_seed in range(3):
        model.forward_backward(2, data_seed=data_seed, forward_only=True)
    kept = schedules.buffers(model.chunks)
    if kept is not None and kept[0]:
        raise Fault(f"{len(kept[0])} activations kept after forward-only windows")


PATCH = Patch(
    "forward-only and aborted windows leave activations for the deferred embedding",
    *schedule_targets(schedule, *PIPELINED),
    groups=("abort", "deferred-embedding"),
)
