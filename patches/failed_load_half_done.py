"""A load that fails on one rank leaves its model half loaded, and the others loaded or waiting.

Symptom:
    A file of a checkpoint is missing or cut, or one rank cannot read it. That rank raises; weights
    and optimizer are in part those of the checkpoint. Other ranks go on with what they have loaded,
    or wait in the next collective until its timeout. A caller that falls back to an older
    checkpoint, or to the run as it was, trains on a mixture.

Cause:
    `mcore_to_pyt_state_dict` has torch read into the model's own tensors, file after file. From
    0.18 on `TorchDistLoadShardedStrategy.load` reads with `no_dist=True`, so that torch tells
    nobody; and before that all that is read outside of torch's load is a rank's own.

Affects:
    0.13 and later, `dist_checkpointing.load` and all that calls it. What the patch does: before a
    rank reads, it opens each file that it is going to read, and looks at its length. All ranks tell
    each other what they found, and again after reading; if one has failed, all raise. What fails
    before the first tensor is read changes nothing. After that (bytes that are wrong, a disk that
    breaks off) the error says that a part is loaded. Embeddings that upstream fills with zeros
    before it reads are copied to the host until then. As before is a load with
    `validate_access_integrity=False`, which may be one rank's own, and one with a group of some
    ranks. In a cloud (`--enable-msc`) ranks tell each other at the end of the load only.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/dist_checkpointing/strategies/torch.py,
    `TorchDistLoadShardedStrategy.load`; no thread found.

Remove when:
    `load` raises on all ranks, and before it has written into the model, where a file is spoilt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ._case import Fault, Original, Patch, arguments, shared_folder, target
from ._checkpoints import PART, UNCHANGED, look_at_files


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Load on all ranks or on none, if all ranks load."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_idempotent.window import agreement

    call = arguments(original, args, kwargs)
    if not call["validate_access_integrity"] or kwargs.get("process_group"):
        return original(*args, **kwargs)
    # Upstream fills these, the padded vocabulary's, with zeros before it reads.
    emptied = [
        (each.data, each.data.detach().to("cpu", copy=True))
        for each in nested_values(call["sharded_state_dict"])
        if isinstance(each, ShardedTensor) and each.allow_shape_mismatch and each.data is not None
    ]
    try:
        with agreement.as_one(PART):
            return original(*args, **kwargs)
    except BaseException as error:  # torch's CheckpointException is no Exception
        for tensor, before in emptied:
            tensor.detach().copy_(before)
        if isinstance(error, agreement.WindowAborted):
            raise CheckpointingException(str(error)) from error
        raise


def determine_global_metadata(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Exchange what is to be loaded, unless a rank could not even begin."""
    from megatron_idempotent.window import agreement

    agreement.meet(UNCHANGED)
    return original(*args, **kwargs)


def get_filesystem_reader(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Return a reader that reads if all ranks can; one of a cloud as it is."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    reader = original(*args, **kwargs)
    if isinstance(getattr(reader, "fs", None), FileSystem):
        reader.read_data = functools.partial(_read_data, reader)
    return reader


def _read_data(reader: Any, plan: Any, planner: Any) -> Any:
    from megatron_idempotent.window import agreement

    with agreement.attempt(UNCHANGED):
        look_at_files(reader, [reader.storage_data[each.storage_index] for each in plan.items])
    future = type(reader).read_data(reader, plan, planner)
    agreement.meet(PART)
    return future


def _load(spoil: Callable[[Any], None]) -> dict[str, Any]:
    """Save 1.0 on two ranks, spoil the files of the second one, load over 2.0; return weights."""
    from pathlib import Path

    import torch
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    rank, folder = torch.distributed.get_rank(), shared_folder()
    weights = {name: torch.full((64,), 1.0) for name in ("first", "second")}

    def state() -> dict[str, Any]:
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        parts = {name: make(name, weight, (0, rank, 2)) for name, weight in weights.items()}
        parts["second"].allow_shape_mismatch = True  # as of a padded vocabulary
        return parts

    dist_checkpointing.save(state(), folder)
    for weight in weights.values():
        weight.fill_(2.0)
    torch.distributed.barrier()
    if rank == 1:
        for path in Path(folder).glob("__1_*.distcp"):
            spoil(path)
    torch.distributed.barrier()
    raised = "nothing"
    try:
        dist_checkpointing.load(state(), folder)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  each kind is a result
        raised = type(error).__name__
    return {"raised": raised, **weights}


def reproduce() -> None:
    """Cut the files of one rank, and load."""
    import os

    import torch

    found = _load(lambda path: os.truncate(path, path.stat().st_size - 8))
    rank, raised = torch.distributed.get_rank(), found.pop("raised")
    for name, weight in found.items():
        if raised == "nothing" or weight.ne(2.0).any():
            raise Fault(f"a file is spoilt; rank {rank} raises {raised}; {name} is loaded")


def neighbour() -> object:
    """Load files that are longer than what was saved, which is all there."""
    found = _load(lambda path: path.write_bytes(path.read_bytes() + bytes(8)))
    return found["raised"], found["first"].tolist(), found["second"].tolist()


PATCH = Patch(
    "a load that fails on one rank leaves models half loaded, and other ranks waiting",
    target(
        "core.dist_checkpointing.serialization:load",
        load,
        "validate_access_integrity or StrictHandling.requires_global_app_metadata(strict)",
    ),
    target(
        "core.dist_checkpointing.validation:determine_global_metadata",
        determine_global_metadata,
        "[ten.without_data() for ten in nested_values(sharded_state_dict)]",
    ),
    target(
        "core.dist_checkpointing.strategies.torch:_get_filesystem_reader",
        get_filesystem_reader,
        "FileSystemReader(checkpoint_dir)",
    ),
    since="0.13",
    needs=("psutil",),
)
