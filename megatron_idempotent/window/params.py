"""Gathers updated parameters before other code reads them; updates the optimizer's copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_idempotent.megatron import gather, optimizers
from megatron_idempotent.megatron.ddp import bucket_groups, checked_chunks
from megatron_idempotent.patching.needs import is_provided


def ensure_params_synced(model_chunks: Sequence[Any]) -> int:
    """Gather the updated parameters that a step with overlap_param_gather left to the next forward.

    Call it before code other than a forward of the chunks reads parameters: export, refit,
    `state_dict`, a copy of the weights, a forward of a module inside of them. Safe to repeat.

    All ranks of the chunks' data-parallel groups take part, expert-parallel ones included. Ranks
    that run the same code have the same gathers pending; if none is pending there is no collective
    and no synchronisation, so that a rank may call it alone. It waits for gathers in flight, skips
    buckets that are up to date, and works with forward pre-hooks on or off. Without
    overlap_param_gather the step has gathered already.

    The patches `params-stale-after-step` and `pending-gather-dropped`, and
    `layerwise-params-stale-after-step` for Muon's layer-wise optimizer, note which gathers are
    pending. Without them everything is gathered on every call. A model that has made no step and no
    forward yet counts as pending, as it does to upstream.

    Args:
        model_chunks: this rank's chunks, wrapped in Megatron's `DistributedDataParallel`.

    Returns:
        The number of bucket groups that this call gathered or waited for.

    Raises:
        ValueError: it got no list of chunks, or a chunk is not wrapped in Megatron's DDP.
        NotImplementedError: the pending update is of MXFP8 parameters that share memory with the
            gradients (reuse_grad_buf_for_mxfp8_param_ag), which only the optimizer can stage.

    Example:
        optimizer.step()
        ensure_params_synced(model_chunks)
        weights = {name: p.detach().cpu() for name, p in model_chunks[0].module.named_parameters()}
    """
    # Check all chunks first: if some ranks gathered only half of them, the others would hang.
    chunks = checked_chunks("ensure_params_synced()", model_chunks, None)
    return sum(map(_sync, chunks))


def ensure_main_params_synced(optimizer: Any) -> int:
    """Copy weights that were written into a model into the optimizer's own copies of parameters.
    Without this, the next step restores the old weights.

    Call it after loading, copying or rolling back weights in a live model without the optimizer's
    state. Otherwise the next step restores the old weights: it updates the main parameters, in
    float32 or on the host, and writes the result over the model. Safe to repeat, and without
    collectives: each rank reads its own shards.

    An element of a main parameter that rounds to the model's keeps its extra float32 bits; moments
    and step counters stay. Megatron's `reload_model_params()` drops these bits, and does nothing
    for a precision-aware optimizer on the device.

    Args:
        optimizer: Megatron's, or a chain of them.

    Returns:
        The number of this rank's main parameters that did not fit the model's.

    Raises:
        ValueError: the optimizer is not Megatron's.

    Example:
        model_chunks[0].load_state_dict(weights)
        ensure_main_params_synced(optimizer)
    """
    import torch

    if not hasattr(optimizer, "reload_model_params"):
        raise ValueError(
            f"ensure_main_params_synced() got a {type(optimizer).__name__}: pass the optimizer "
            "that get_megatron_optimizer made, not the model's chunks or the torch optimizer in it"
        )
    number = 0
    with torch.no_grad():
        for model, main in optimizers.main_parameters(optimizer):
            mask, moved = optimizers.outdated(model, main)
            if mask.any():
                main.copy_(torch.where(mask, moved.to(main.dtype), main))
                number += 1
        for part in optimizers.unchained(optimizer):
            if optimizers.is_hybrid(getattr(part, "optimizer", None)):
                optimizers.renew_copies(part.optimizer, widened=False)
    return number


def finish_gathers(chunks: Sequence[Any]) -> int:
    """Gather pending updates of chunks in Megatron's DDP.
    Return the number of bucket groups that were gathered or waited for.
    """
    return sum(_sync(chunk) for chunk in chunks if hasattr(chunk, "bucket_groups"))


def _sync(chunk: Any) -> int:
    if not chunk.ddp_config.overlap_param_gather:
        return 0
    groups = bucket_groups(chunk)
    for group in groups:
        if not _is_tracked(group):
            gather.mark(group)
    waiting = [g for g in groups if g.param_gather_handle is not None or gather.marked(g)]
    if waiting and gather.shares_memory_with_gradients(chunk):
        raise NotImplementedError(
            f"ensure_params_synced() found {len(waiting)} bucket groups with an update pending and "
            "reuse_grad_buf_for_mxfp8_param_ag=True, where parameters and gradients share memory: "
            "stage the update with the optimizer first and gather with "
            "chunk.start_param_sync(force_sync=True), as force_param_sync of 0.19 does"
        )
    if waiting:
        gather.gather(chunk)
    return len(waiting)


def _is_tracked(group: Any) -> bool:
    """Return whether patches mark a bucket group when its parameters are updated, and clear the
    mark when they are gathered. Then the mark tells whether a gather is pending.

    Before the first mark upstream's flag is used. If this returns False, the caller assumes that
    the gather is pending.
    """
    watched = is_provided(_watch_of(group))
    if gather.marked(group) is None:
        # Reduced gradients that wait for the first step: no parameter was updated yet.
        return watched and (group.param_gather_dispatched or gather.holds_gradients(group))
    # Patches for the distributed optimizer clear marks of layer-wise groups too, but set none.
    return watched or not gather.is_layer_wise(group)


def _watch_of(group: Any) -> str:
    """Return the key in `PROVIDED` for the patches that mark the updates of a bucket group, and
    clear the mark in its gathers.
    """
    if gather.gathers_by_lists(group):
        return "list-gathers-watched"
    return "layer-wise-gathers-watched" if gather.is_layer_wise(group) else "gathers-watched"
