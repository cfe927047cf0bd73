"""After the resiliency extension aborted a save, later checkpoints have others' metadata.

Symptom:
    After an in-process restart, or `abort_nvrx_checkpoint()`, saves report success, but each has
    the metadata of the save before: it cannot be read once the length of an item has changed. Or
    the aborted save counts as saved, without its files, and the next one raises `results_queue
    should not be empty`.

Cause:
    As in `aborted-save-spoils-later`: an abort clears neither the worker's results in a queue of
    the whole process, nor the list of saves.

Affects:
    0.6.0 and 0.7.0, with a persistent worker. What the patch does: an abort waits for the worker to
    end, and forgets its saves and results.

Upstream:
    https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/src/nvidia_resiliency_ext/checkpointing/async_ckpt/core.py,
    `abort_nvrx_checkpoint`; no thread found.

Remove when:
    `AsyncCallsQueue.close(abort=True)` forgets saves and their results.
"""

from __future__ import annotations

import importlib

from megatron_idempotent.patches import _writers
from megatron_idempotent.patches._case import Patch, target

_CORE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


def reproduce() -> None:
    """Abort one save of the resiliency extension after its files are written, and one before.
    Save and load after each of them. Without the patch a later checkpoint has the metadata of an
    aborted save.
    """
    _writers.aborts(importlib.import_module(_CORE), "nvrx")


PATCH = Patch(
    "after the resiliency extension aborted a save later checkpoints have others' metadata",
    target(
        f"{_CORE}:AsyncCallsQueue.close",
        _writers.abort_all,
        "self.persistent_caller.close(abort=abort)",
    ),
    stock_error="CheckpointException: ",
    since="0.6",
    ranks=1,
    needs=("psutil",),
    loudness="both",
)
