"""After an asynchronous save was aborted, later checkpoints have the metadata of those before.

Symptom:
    After an in-process restart (`--inprocess-restart`), or `AsyncCallsQueue.close(abort=True)`,
    saves report success, but each has the metadata of the save before: it cannot be read once the
    length of an item has changed. Or the aborted save counts as saved, without its files, and the
    next one raises `results_queue should not be empty`.

Cause:
    The worker puts its results into a queue of the whole process, and finalizing a save takes the
    oldest one. An abort clears neither this queue nor the list of saves:
    `reset_persistent_async_worker` reads a name that it imported while it was None.

Affects:
    0.15 and later, with a persistent worker (`--use-persistent-ckpt-worker`). What the patch does:
    an abort waits for the worker to end, and forgets its saves and results.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/async_utils.py,
    `reset_persistent_async_worker`; no thread found.

Remove when:
    `AsyncCallsQueue.close(abort=True)` forgets saves and their results.
    `upstream/aborted-save-spoils-later` has the repair.
"""

from __future__ import annotations

from . import _writers
from ._case import Patch, address, target


def reproduce() -> None:
    """Abort one save after its files are written and one before; save and load after each of them.
    On stock Megatron a later checkpoint then has the metadata of the aborted save, or cannot be
    loaded.
    """
    from megatron.core.dist_checkpointing.strategies import async_utils

    _writers.aborts(async_utils, "mcore")


PATCH = Patch(
    "after an asynchronous save was aborted later checkpoints have the metadata of those before",
    target(
        "core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.close", _writers.abort_all
    ),
    stock_error="CheckpointException: ",
    since="0.15",
    ranks=1,
    needs=("psutil",),
    loudness="both",
    fixed_by=(
        (
            address("core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.close"),
            "self.async_calls.clear()",
        ),
    ),
)
