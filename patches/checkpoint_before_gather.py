"""With overlap_param_gather, a checkpoint saved right after a step lacks the step.

Symptom:
    `dist_checkpointing.save` of a model's `sharded_state_dict` after `optimizer.step()` writes the
    old parameters, except for the shard of the rank that happens to write. Loading it is silent:
    the first forwards use a mixture of two models, until a step restores the parameters from the
    optimizer's own copy; without the optimizer's state the mixture stays.

Cause:
    The step leaves the gather to the next forward. Before it saves, `megatron.training` disables
    the forward pre-hooks, which gathers the parameters; a caller with its own loop has to know
    that.

Affects:
    Every release, with the distributed optimizer and overlap_param_gather. What the patch does:
    `save`, in which all ranks take part anyway, first gathers the chunks that have an update
    pending and whose parameter buffers are in the state_dict. If nothing is pending it does not
    read the state_dict. Before a save by some ranks only (torch.save, DP rank 0 alone), call
    `ensure_params_synced` on all ranks.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py,
    `save_checkpoint_and_time`.

Remove when:
    `sharded_state_dict` or `save` of upstream synchronises the parameters. By design: neither
    `save()` nor `sharded_state_dict()` knows DDP, and a gather in them would be a collective, which
    some callers run on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_idempotent.megatron import gather
from megatron_idempotent.megatron.ddp import bucket_groups

from ._case import Original, Patch, arguments, begin_save, bench, expect_agreement, target


def save(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap `dist_checkpointing.save`: first gather the updated parameters that are to be saved."""
    pending = [
        chunk
        for chunk in gather.watched_chunks()
        if any(gather.marked(group) for group in bucket_groups(chunk))
        and not gather.shares_memory_with_gradients(chunk)
    ]
    if pending:
        saved = _storages(arguments(original, args, kwargs)["sharded_state_dict"])
        for chunk in pending:
            if not saved.isdisjoint(_parameter_storages(chunk)):
                gather.gather(chunk)
    return original(*args, **kwargs)


def _storages(state_dict: Any) -> set[int]:
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    values = (getattr(value, "data", value) for value in nested_values(state_dict))
    return {
        value.untyped_storage().data_ptr() for value in values if isinstance(value, torch.Tensor)
    }


def _parameter_storages(chunk: Any) -> Iterator[int]:
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        # A layer-wise optimizer that gathers by lists keeps parameters outside of a flat buffer.
        tensors = buffer.params if buffer.param_data is None else [buffer.param_data]
        yield from (tensor.untyped_storage().data_ptr() for tensor in tensors)


def step(original: Original, self: Any) -> Any:
    """Wrap an optimizer's update: watch its chunks, and mark their updated bucket groups, so that a
    later save gathers the parameters first.
    """
    for chunk in self.model_chunks:
        if hasattr(chunk, "bucket_groups"):
            gather.watch(chunk)
    return gather.updating(original, self)


def reproduce() -> None:
    """Save right after a step with overlap_param_gather, and stop before anything is written.
    On stock Megatron the ranks' parameters then differ: the step's gather has not run.
    """
    model = bench(overlap_param_gather=True)
    model.train_step(2, data_seed=0)
    begin_save(model.chunks[0].module.sharded_state_dict())
    expect_agreement(model, "where a checkpoint is written")


PATCH = Patch(
    "a distributed checkpoint saved right after a step holds parameters that lack it",
    target("core.dist_checkpointing.serialization:save", save, "sharded_state_dict"),
    target("distributed.step_with_ready_grads", step),
    target("group.start_param_sync", gather.start_param_sync),
    groups=("overlap",),
)
