"""After an asynchronous save was aborted, later checkpoints have the metadata of those before.

Symptom:
    After an in-process restart (`--inprocess-restart`), or `AsyncCallsQueue.close(abort=True)`,
    saves end well. Each one's metadata is that of the save before: it cannot be read once the
    length of something in it has changed. Or the save that was aborted counts as saved, without its
    files, and the next one raises `results_queue should not be empty`.

Cause:
    The worker puts what it has written into a queue of the whole process, and the finalization of a
    save takes the oldest. An abort leaves the queue, and the list of saves, as they are:
    `reset_persistent_async_worker` looks at a name that it has imported while that was None.

Affects:
    0.15 and later, with a persistent worker (`--use-persistent-ckpt-worker`). What the patch does:
    an abort waits for the worker to end, and forgets its saves and what it has written.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/async_utils.py,
    `reset_persistent_async_worker`; no thread found.

Remove when:
    `AsyncCallsQueue.close(abort=True)` forgets saves and what was written for them.
"""

from __future__ import annotations

from . import _writers
from ._case import Patch, target


def reproduce() -> None:
    """Abort a save that is written, and one that is not; save after each, and load that."""
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
)
