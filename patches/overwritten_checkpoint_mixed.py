"""A save over an older checkpoint that is interrupted leaves one that loads, of parts of both.

Symptom:
    A run that was rolled back by one checkpoint saves that iteration again, and is ended while it
    writes, or while an asynchronous save does. The folder then loads without an error: files that
    were written are of the new checkpoint, the others of the old one. Before 0.19 iteration,
    scheduler and learning rates are new as soon as the save begins, whatever is written after that.

Cause:
    `save` writes into a folder that has files, and warns at most. `metadata.json` and `.metadata`
    of the older checkpoint, which say that it is complete, stay there all the time.

Affects:
    Every release; the writer of 0.12 does not run with a torch of today. What the patch does: rank
    0 takes both files away before it saves, and puts them back if the save raised before anything
    was written. A folder of which only parts are written is "not a distributed checkpoint". A
    folder in a cloud (`--enable-msc`) and the format `torch` are as before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `save_checkpoint`, at "TODO Handle non-empty directories"; no thread found.

Remove when:
    `save` makes the older checkpoint invalid before it writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._case import Fault, Original, Patch, arguments, shared_folder, target


def save(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Let the folder be no checkpoint until the new one is complete."""
    import torch

    folder = Path(str(arguments(original, args, kwargs)["checkpoint_dir"]))
    marks: dict[Path, bytes] = {}
    if torch.distributed.get_rank() == 0:
        for name in ("metadata.json", ".metadata"):
            if (folder / name).is_file():
                marks[folder / name] = (folder / name).read_bytes()
                (folder / name).unlink()
        written = _files(folder)
    try:
        return original(*args, **kwargs)
    except BaseException:
        if marks and _files(folder) == written:
            for path, content in marks.items():
                path.write_bytes(content)
        raise


def _files(folder: Path) -> list[tuple[str, int, int]]:
    if not folder.is_dir():
        return []
    states = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def reproduce() -> None:
    """Save over a checkpoint of two ranks, of which the second one ends before it writes."""
    import contextlib
    import inspect

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    rank = torch.distributed.get_rank()

    def state(value: float) -> dict[str, Any]:
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        return {"weight": make("weight", torch.full((4,), value), (0, rank, 2))}

    folder = shared_folder()
    dist_checkpointing.save(state(1.0), folder)
    how: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        how["async_strategy"] = "mcore"  # without nvidia-resiliency-ext
    request = dist_checkpointing.save(state(2.0), folder, **how)
    write = request.async_fn if rank == 0 else None
    request._replace(async_fn=write, finalize_fns=[]).execute_sync()
    with contextlib.suppress(CheckpointingException):
        loaded = dist_checkpointing.load(state(0.0), folder)["weight"]
        raise Fault(f"saved 1, then 2 on rank 0 alone: rank {rank} loads {loaded[0]:g}")


PATCH = Patch(
    "an interrupted save over an older checkpoint leaves a mixture that loads",
    target("core.dist_checkpointing.serialization:save", save, "save_preprocess"),
    since="0.13",
    needs=("psutil",),
)
