"""A `torch_dist` checkpoint cannot be asked for its tensors' shapes with torch 2.15.

Symptom:
    `TypeError: empty() received an invalid combination of arguments`, which names `strides`, from
    `load_plain_tensors`, `load_tensors_metadata`, `load_sharded_metadata`, and a load that compares
    what it wants with what is there (`--dist-ckpt-strictness log_all` and others). slime asks so
    whether a critic's head has to be made, and Bridge before it loads shared adapters of experts.

Cause:
    The strategy of the load hands all that torch keeps of a tensor's properties to `torch.empty`.
    Since 2.15 these are strides, too, which that function does not take.

Affects:
    0.13 and later, with torch 2.15 and later, on which 0.12 cannot write. What the patch does:
    upstream sees properties without strides. What it makes of them has no data, and no strides
    either. With an older torch the patch does nothing.

Upstream:
    https://github.com/pytorch/pytorch/pull/192248 adds the field; no thread found at Megatron's.

Remove when:
    `load_tensors_metadata` names what it hands to `torch.empty`.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, shared_folder, target


def load_tensors_metadata(
    original: Original, self: Any, checkpoint_dir: Any, metadata: Any = None
) -> Any:
    """Describe the tensors of a checkpoint by properties that have no strides."""
    import copy

    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
    from torch.distributed.checkpoint.metadata import TensorProperties

    if not hasattr(TensorProperties, "strides"):
        return original(self, checkpoint_dir, metadata)
    if metadata is None:
        metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
    described = dict(metadata.state_dict_metadata)
    for name, each in described.items():
        if hasattr(each, "properties"):
            described[name] = copy.copy(each)
            described[name].properties = copy.copy(each.properties)
            del described[name].properties.strides
    metadata = copy.copy(metadata)
    metadata.state_dict_metadata = described
    return original(self, checkpoint_dir, metadata)


def reproduce() -> None:
    """Save a tensor, ask for its shape, and load it by what is said of it."""
    import torch
    from megatron.core import dist_checkpointing

    folder, weight = shared_folder(), torch.arange(6.0).view(2, 3)
    saved = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", weight)
    dist_checkpointing.save({"weight": saved}, folder)
    (said,) = dist_checkpointing.load_tensors_metadata(folder).values()
    loaded = dist_checkpointing.load_plain_tensors(folder)["weight"]
    if said.global_shape != (2, 3) or not torch.equal(loaded.cpu(), weight):
        raise Fault(f"{weight} was saved; said is {said}, loaded {loaded}")


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
)
