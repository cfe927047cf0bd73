"""A checkpoint that was written over an older one is read by the older one's table of contents.

Symptom:
    After a roll back the run saves an iteration again, into the same folder. A load in the same
    process returns wrong values, or fails with `EOFError` or an error of unpickling: it reads at
    the offsets of the older checkpoint.

Cause:
    With `--ckpt-assume-constant-structure` a load caches the folder's `.metadata` under the
    folder's name, and no save removes it.

Affects:
    0.17 and later, with Megatron's own reader. Not repaired: the reader of nvidia-resiliency-ext,
    which loads a checkpoint that was saved with `--async-strategy nvrx`. What the patch does: the
    cached metadata are used only for the file that they were read from.

Upstream:
    https://github.com/ROCm/Megatron-LM/pull/138 repairs it in a fork.

Remove when:
    the reader notices that `.metadata` is another file. `upstream/checkpoint-metadata-stale` has
    the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, target


def read_metadata(original: Original, self: Any) -> Any:
    """Wrap the cached read of a checkpoint's metadata: a new `.metadata` file is read again.
    The cache's key is the folder, and the file's inode, time and size. Older entries of the folder
    are dropped.
    """
    import os

    if self._cache_key is not None:
        folder = os.path.abspath(os.fspath(self.path))
        file = os.stat(os.path.join(folder, ".metadata"))
        self._cache_key = (folder, file.st_ino, file.st_mtime_ns, file.st_size)
        cache = type(self)._metadata_cache
        for key in [key for key in cache if key[0] == folder and key != self._cache_key]:
            del cache[key]
    return original(self)


def reproduce() -> None:
    """Save to one folder and load from it, twice, with different values and sizes.
    On stock Megatron the second load reads at the offsets of the first checkpoint.
    """
    import tempfile

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint.api import CheckpointException

    def state(value: float, counted: Any) -> dict[str, Any]:
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        note = dist_checkpointing.mapping.ShardedObject("note", counted, (1,), (0,))
        return {"note": note, "weight": make("weight", torch.full((64,), value))}

    with tempfile.TemporaryDirectory() as folder:
        for value in (1.0, 2.0):
            # The object's size changes, as that of a run's random states does.
            dist_checkpointing.save(state(value, "n" * int(1000 * value)), folder)
            reader = TorchDistLoadShardedStrategy(cache_metadata=True)
            try:
                loaded = dist_checkpointing.load(state(0.0, ""), folder, reader)
            except CheckpointException as error:
                raise Fault("what was saved last cannot be loaded") from error
            if not torch.equal(loaded["weight"], torch.full((64,), value)):
                raise Fault("what was saved last cannot be loaded")


PATCH = Patch(
    "a checkpoint that was saved again is read by its older table of contents",
    target(
        "core.dist_checkpointing.strategies.cached_metadata_filesystem_reader:"
        "CachedMetadataFileSystemReader.read_metadata",
        read_metadata,
        "CachedMetadataFileSystemReader._metadata_cache[self._cache_key]",
    ),
    since="0.17",
    ranks=1,
    needs=("psutil",),
    loudness="both",
    fixed_by=(
        (
            address(
                "core.dist_checkpointing.strategies.cached_metadata_filesystem_reader:CachedMetadataFileSystemReader.read_metadata"
            ),
            "self._metadata_cache.pop(self._cache_key, None)",
        ),
    ),
)
