"""A load that fails on one rank leaves its model half loaded, and the others loaded or waiting.

Symptom:
    A file of a checkpoint is missing or truncated, or one rank cannot read it. That rank raises; a
    part of its weights and optimizer comes from the checkpoint. Other ranks go on with their loaded
    values, or wait in the next collective until its timeout. A caller that falls back to an older
    checkpoint, or to the run in memory, trains on a mixture.

Cause:
    `mcore_to_pyt_state_dict` lets torch read into the model's own tensors, file by file. From 0.18
    on `TorchDistLoadShardedStrategy.load` reads with `no_dist=True`, so that torch does not report
    a failure to other ranks. Before that, failures outside of torch's load stay on their rank.

Affects:
    0.13 and later, `dist_checkpointing.load` and all that calls it. What the patch does: before a
    rank reads, it opens each file that it will read, and checks its length. All ranks exchange
    failures, and again after reading; if one has failed, all raise. A failure before the first
    tensor is read changes nothing. After a later failure (wrong bytes, a disk that fails) the error
    says that a part is loaded. Embeddings that upstream fills with zeros before it reads are copied
    to the host, to restore them. Unchanged: loads with `validate_access_integrity=False`, which a
    single rank may call, and loads in a group of some ranks. With cloud storage (`--enable-msc`)
    ranks exchange failures at the end of the load only.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/dist_checkpointing/strategies/torch.py,
    `TorchDistLoadShardedStrategy.load`; no thread found.

Remove when:
    for a damaged file `load` raises on all ranks, before it has written into the model.
    `upstream/failed-load-half-done` has the repair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._case import Fault, Original, Patch, address, arguments, shared_folder, target
from ._checkpoints import PART, UNCHANGED, look_at_files, reports_failures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_idempotent.patching.source import Body


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load: if one rank raises, raise on all ranks, and restore tensors that were zeroed.
    A load that only some ranks enter is run unchanged.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_idempotent.window import agreement

    call = arguments(original, args, kwargs)
    if not call["validate_access_integrity"] or kwargs.get("process_group"):
        return original(*args, **kwargs)
    # Upstream fills the padded vocabulary's tensors with zeros before it reads.
    emptied = [
        (item.data, item.data.detach().to("cpu", copy=True))
        for item in nested_values(call["sharded_state_dict"])
        if isinstance(item, ShardedTensor) and item.allow_shape_mismatch and item.data is not None
    ]
    try:
        with agreement.as_one(PART):
            return original(*args, **kwargs)
    except BaseException as error:  # torch's CheckpointException is no Exception
        for tensor, saved in emptied:
            tensor.detach().copy_(saved)
        if isinstance(error, agreement.WindowAborted):
            raise CheckpointingException(str(error)) from error
        raise


def determine_global_metadata(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load's exchange of metadata: first raise on all ranks if one rank has failed."""
    from megatron_idempotent.window import agreement

    agreement.meet(UNCHANGED)
    return original(*args, **kwargs)


def get_filesystem_reader(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Return a reader that raises on all ranks before it reads, if one rank's files are damaged.
    Readers of cloud storage are returned unchanged.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem

    reader = original(*args, **kwargs)
    if isinstance(getattr(reader, "fs", None), FileSystem):
        reader.read_data = functools.partial(_read_data, reader)
    return reader


def _read_data(reader: Any, plan: Any, planner: Any) -> Any:
    from megatron_idempotent.window import agreement

    with agreement.attempt(UNCHANGED):
        look_at_files(reader, [reader.storage_data[item.storage_index] for item in plan.items])
    future = type(reader).read_data(reader, plan, planner)
    agreement.meet(PART)
    return future


def _load(spoil: Callable[[Any], None]) -> dict[str, Any]:
    """Save weights of 1.0 on two ranks, apply `spoil` to rank 1's files, and load over 2.0.
    Return the weights after the load, and as "raised" the error's type name, or "nothing".
    """
    from pathlib import Path

    import torch
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    rank, folder = torch.distributed.get_rank(), shared_folder()
    weights = {name: torch.full((64,), 1.0) for name in ("first", "second")}

    def state() -> dict[str, Any]:
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        parts = {name: make(name, weight, (0, rank, 2)) for name, weight in weights.items()}
        parts["second"].allow_shape_mismatch = True  # like a padded vocabulary
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
    """Truncate the files of one of two ranks, and load.
    On stock Megatron one rank raises, and weights are loaded in part.
    """
    import os

    import torch

    results = _load(lambda path: os.truncate(path, path.stat().st_size - 8))
    rank, raised = torch.distributed.get_rank(), results.pop("raised")
    for name, weight in results.items():
        if raised == "nothing" or weight.ne(2.0).any():
            raise Fault(f"a file is truncated; rank {rank} raises {raised}; {name} is loaded")


def control() -> object:
    """Load files with extra bytes after their intact data, as a control.
    Return the error's type name, here "nothing", and the loaded weights.
    """
    results = _load(lambda path: path.write_bytes(path.read_bytes() + bytes(8)))
    return results["raised"], results["first"].tolist(), results["second"].tolist()


_LOAD = "core.dist_checkpointing.serialization:load"


def _repaired(bodies: Mapping[str, Body]) -> bool:
    """Tell if `load` looks at files before it reads, and ranks report failures of both to all."""
    steps = ("_verify_files", "sharded_strategy.load")
    return all(reports_failures(bodies[address(_LOAD)], step) for step in steps)


PATCH = Patch(
    "a load that fails on one rank leaves models half loaded, and other ranks waiting",
    target(
        _LOAD,
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
    fixed_when=_repaired,
    needs=("psutil",),
    loudness="both",
)
