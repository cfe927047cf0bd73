"""Tracks which bucket groups still wait for an overlapped gather of their parameters.

It works for the distributed optimizer and `LayerWiseDistributedOptimizer`.

Upstream's `param_gather_dispatched` does not tell: it is reset when gradients are finished, not
when parameters change. So we mark a bucket group when an optimizer writes its parameters, and clear
the mark when a gather of them is dispatched. All ranks of a data-parallel group step together, so
their marks are the same.

`LayerWiseDistributedOptimizer` is a chain of optimizers, each with complete parameters of this
rank. It is no DistributedOptimizer, and its updates do not call the methods that `gather` watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys

from .ddp import bucket_groups

_MARK = "megatron_idempotent_update_pending"
_HELD = "megatron_idempotent_gradients_wait"
# Keys in order of insertion: ranks that update chunks in the same order must also gather in it.
_watched: PerProcessWeakKeys[Any, None] = PerProcessWeakKeys(__name__, "_watched")


def owned_groups(optimizer: Any) -> list[Any]:
    """Return the bucket groups whose parameters this distributed optimizer writes.

    Dense and expert parameters of one chunk belong to different optimizers, and so do the chunks of
    one rank under overlap_param_gather_with_optimizer_step.
    """
    buckets = {
        id(bucket) for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets
    }
    return [
        group
        for chunk in optimizer.model_chunks
        if hasattr(chunk, "bucket_groups")  # Megatron-FSDP has none
        for group in bucket_groups(chunk)
        if any(id(bucket) in buckets for bucket in group.buckets)
    ]


def is_layer_wise(group: Any) -> bool:
    """Return whether a `LayerWiseDistributedOptimizer` writes parameters of this bucket group."""
    return gathers_by_lists(group) or any(
        getattr(bucket.params_list[0], "is_managed_by_layer_wise_optimizer", False)
        for bucket in group.buckets
        if bucket.params_list
    )


def gathers_by_lists(group: Any) -> bool:
    """Return whether a bucket group gathers lists of whole parameters, not slices of a buffer."""
    return any(getattr(bucket, "layerwise_params_list", None) for bucket in group.buckets)


def mark(group: Any) -> None:
    """Record that parameters of `group` are about to change on the rank that owns them."""
    setattr(group, _MARK, True)


def marked(group: Any) -> bool | None:
    """Return whether `group` has updated parameters not gathered yet; None before any `mark`."""
    pending: bool | None = getattr(group, _MARK, None)
    return pending


def hold_gradients(group: Any, waiting: bool) -> None:
    """Record whether `group` has reduced gradients that wait for an optimizer step."""
    setattr(group, _HELD, waiting)


def holds_gradients(group: Any) -> bool:
    """Return whether `group` has reduced gradients that wait for a step (see `hold_gradients`).

    A gather into the gradients' memory would overwrite them.
    """
    return bool(getattr(group, _HELD, False))


def watch(chunk: Any) -> None:
    """Add a chunk that an optimizer updates to `watched_chunks()`, by a weak reference."""
    _watched.setdefault(chunk, None)


def watched_chunks() -> list[Any]:
    """Return the chunks passed to `watch` that still exist, in the order of their first call."""
    return list(_watched)


def updating(original: Callable[..., Any], self: Any) -> Any:
    """Wrap an optimizer's update: `mark` the bucket groups whose parameters it writes as not
    gathered, then run the update.

    The marks are set first, because without overlap_param_gather upstream gathers in the update.
    """
    for group in owned_groups(self):
        mark(group)
    return original(self)


def start_param_sync(original: Callable[..., Any], self: Any, force_sync: bool = False) -> Any:
    """Wrap a bucket group's `start_param_sync`: run the gather, and undo `mark`. If a gather was in
    flight before the call, whose values may be old, the group stays marked.
    """
    stale_in_flight = force_sync and self.param_gather_handle is not None
    result = original(self, force_sync=force_sync)
    # With a gather in flight `force_sync` only waits for it, and it has the values of its start.
    if not stale_in_flight:
        setattr(self, _MARK, False)
    return result


def wait(group: Any) -> None:
    """Wait for the parameter gather of `group` that is in flight, if any; never start one.

    It calls upstream's `finish_param_sync`, which completes a gather.
    """
    if group.param_gather_handle is not None:
        group.param_gather_dispatched = True  # or upstream would dispatch it again
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather(chunk: Any) -> None:
    """Gather the parameters of those bucket groups of `chunk` that are `marked` as updated and not
    gathered. Wait for these gathers, and for those in flight before.

    All ranks of the chunk's data-parallel groups must enter if any group is marked: the
    all-gathers below hang otherwise.
    """
    import torch

    groups = bucket_groups(chunk)
    with torch.no_grad():
        for group in groups:
            wait(group)
        stale = [group for group in groups if marked(group)]
        for group in stale:
            group.start_param_sync()
        for group in stale:
            wait(group)


def finish_update(chunks: list[Any]) -> None:
    """Gather the updated parameters that a step with overlap_param_gather left to the next forward.
    `chunks` may be wrapped in DDP or not; chunks without overlap_param_gather are skipped.

    All ranks of the chunks' data-parallel groups take part. A group that no patch watches is always
    gathered. MXFP8 parameters that share memory with gradients are left alone.
    """
    for chunk in chunks:
        options = getattr(chunk, "ddp_config", None)
        if not getattr(options, "overlap_param_gather", False) or shares_memory_with_gradients(
            chunk
        ):
            continue
        groups = bucket_groups(chunk)
        for group in groups:
            if marked(group) is None:
                mark(group)
        if any(marked(group) or group.param_gather_handle is not None for group in groups):
            gather(chunk)


def shares_memory_with_gradients(chunk: Any) -> bool:
    """Return whether a chunk's parameters share memory with its gradients, as MXFP8 ones can.

    Then only the training loop can copy the update there for a gather.
    """
    return bool(getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False))


_CHUNKS = "_megatron_idempotent_chunks"


def remember_chunks(original: Callable[..., None], self: Any, model_chunks: Any) -> None:
    """Wrap a layer-wise optimizer's method that gets the model chunks: also store them on `self`.
    Upstream does not store the chunks in 0.17 and in commits up to 0.18.
    """
    original(self, model_chunks)
    setattr(self, _CHUNKS, list(model_chunks))


def deferred_groups(optimizer: Any) -> list[Any]:
    """Return the bucket groups whose gather a layer-wise optimizer leaves to forward pre-hooks.
    The list is empty for any other optimizer, and without overlap_param_gather.

    All ranks get the same ones, even a rank that owns none of the parameters.
    """
    if not _defers(optimizer):
        return []
    return [
        group
        for chunk in _chunks(optimizer)
        for group in bucket_groups(chunk)
        if is_layer_wise(group)
    ]


def watch_layer_wise(optimizer: Any) -> None:
    """Call `watch` for a layer-wise optimizer's chunks if the next forward has to gather them.
    A save of a checkpoint then gathers the parameters before it reads them.
    """
    if _defers(optimizer):
        for chunk in _chunks(optimizer):
            watch(chunk)


def outdate(group: Any) -> None:
    """Mark a bucket group's gathered parameters as out of date; the next forward gathers again.
    If a gather is in flight, wait for it first, and drop its result.
    """
    if group.param_gather_handle is not None:
        # Only wait: the gathered values are about to be overwritten.
        group.param_gather_handle.wait()
        group.param_gather_handle = None
        for bucket in group.buckets:
            bucket.layerwise_gather_list = None
    group.param_gather_dispatched = False
    mark(group)


def _defers(optimizer: Any) -> bool:
    if not hasattr(optimizer, "set_bucket_layerwise_params_list"):
        return False  # some other chain
    # 0.17 calls it `async_allgather`.
    return bool(
        getattr(optimizer, "overlap_param_gather", False)
        or getattr(optimizer, "async_allgather", False)
    )


def _chunks(optimizer: Any) -> list[Any]:
    chunks = getattr(optimizer, "model_chunks", None) or getattr(optimizer, _CHUNKS, None)
    if chunks is None:
        import warnings

        warnings.warn(
            "a LayerWiseDistributedOptimizer, which on this Megatron forgets its model chunks, was "
            "built before megatron_idempotent.apply(): its updates are not watched. Call apply() "
            "first",
            stacklevel=2,
        )
        setattr(optimizer, _CHUNKS, [])  # so that it warns once
        return []
    return list(chunks)
