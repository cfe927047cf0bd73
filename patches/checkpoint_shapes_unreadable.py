"""A `torch_dist` checkpoint cannot be asked for its tensors' shapes with torch 2.15.

Symptom:
    `TypeError: empty() received an invalid combination of arguments`, which names `strides`, from
    `load_plain_tensors`, `load_tensors_metadata`, `load_sharded_metadata`, and from a load that
    compares requested and stored tensors (`--dist-ckpt-strictness log_all` and others). slime reads
    shapes to find out whether it must create a critic's head, and Bridge before it loads shared
    adapters of experts.

Cause:
    The load strategy passes all stored properties of a tensor to `torch.empty`. Since torch 2.15
    these include strides, which that function does not take.

Affects:
    0.13 and later, with torch 2.15 and later, on which 0.12 cannot write. What the patch does:
    upstream sees properties without strides. It creates tensors on the meta device from them, for
    which strides do not matter. With an older torch the patch does nothing.

Upstream:
    https://github.com/pytorch/pytorch/pull/192248 adds the field; no thread found at Megatron.

Remove when:
    `load_tensors_metadata` passes named properties to `torch.empty`.
    `upstream/checkpoint-shapes-unreadable` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, shared_folder, target


def load_tensors_metadata(
    original: Original, self: Any, checkpoint_dir: Any, metadata: Any = None
) -> Any:
    """Wrap the load of tensors' metadata: remove the `strides` that torch 2.15 has added."""
    import copy

    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
    from torch.distributed.checkpoint.metadata import TensorProperties

    if not hasattr(TensorProperties, "strides"):
        return original(self, checkpoint_dir, metadata)
    if metadata is None:
        metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
    described = dict(metadata.state_dict_metadata)
    for name, stored in described.items():
        if hasattr(stored, "properties"):
            described[name] = copy.copy(stored)
            described[name].properties = copy.copy(stored.properties)
            del described[name].properties.strides
    metadata = copy.copy(metadata)
    metadata.state_dict_metadata = described
    return original(self, checkpoint_dir, metadata)


def reproduce() -> None:
    """Save a tensor, then read its shape and its values with Megatron's functions for both.
    On stock Megatron with torch 2.15 the read raises a `TypeError`.
    """
    import torch
    from megatron.core import dist_checkpointing

    folder, weight = shared_folder(), torch.arange(6.0).view(2, 3)
    saved = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", weight)
    dist_checkpointing.save({"weight": saved}, folder)
    (metadata,) = dist_checkpointing.load_tensors_metadata(folder).values()
    loaded = dist_checkpointing.load_plain_tensors(folder)["weight"]
    if metadata.global_shape != (2, 3) or not torch.equal(loaded.cpu(), weight):
        raise Fault(f"{weight} was saved; the metadata are {metadata}, and {loaded} is loaded")


PATCH = Patch(
    "a checkpoint cannot be asked for its tensors' shapes with torch 2.15",
    target(
        "core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata",
        load_tensors_metadata,
        "tp.properties.__dict__",
    ),
    since="0.13",
    ranks=1,
    stock_error=r"TypeError: .*strides",
    needs=("psutil",),
    fixed_by=(
        (
            address(
                "core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata"
            ),
            "torch.empty(tp.size, dtype=tp.properties.dtype, device='meta')",
        ),
    ),
)
