"""An interrupted save over an older checkpoint leaves a mixture of both, which loads.

Symptom:
    A run that was rolled back by one checkpoint saves that iteration again, and is stopped while
    it, or an asynchronous save, is writing. The folder then loads without an error: some files are
    from the new checkpoint, the others from the old one. Before 0.19 iteration, scheduler and
    learning rates are new as soon as the save begins.

Cause:
    `save` writes into a folder that has files, and at most warns. `metadata.json` and `.metadata`
    of the older checkpoint, which mark it as complete, stay in the folder during the save.

Affects:
    Every release; the writer of 0.12 does not run with today's torch. What the patch does: rank 0
    removes both files before it saves, and restores them if the save raised before it wrote a file.
    A folder with only a part of the new files is "not a distributed checkpoint". Cloud storage
    (`--enable-msc`) and the format `torch` are left as they are.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `save_checkpoint`, at "TODO Handle non-empty directories"; no thread found.

Remove when:
    `save` makes the older checkpoint invalid before it writes.
    `upstream/overwritten-checkpoint-mixed` has the repair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._case import Fault, Original, Patch, address, arguments, shared_folder, target


def save(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a save into an older checkpoint's folder: first remove the older checkpoint's metadata.
    A mixture of both checkpoints then cannot be loaded. If the save raises before it writes, the
    metadata are restored.
    """
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
    """Save over a checkpoint of two ranks, but let only rank 0 write, and load.
    On stock Megatron the load returns a mixture of the two checkpoints.
    """
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
    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"  # without nvidia-resiliency-ext
    request = dist_checkpointing.save(state(2.0), folder, **options)
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
    fixed_by=(
        (
            address("core.dist_checkpointing.serialization:save"),
            "stale_files = [path for path in marks if path.is_file()]",
        ),
    ),
)
