"""Moves buckets from a trainer to an engine's workers, as JSON and raw bytes.

Both ends may run another Python and another torch: nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.rl.weights.records import UpdateDamaged

from .base import Announcement, Receiver, Sender, TransportError, TransportTimeout
from .bucket import BucketReceiver, BucketSender
from .cuda_ipc import CudaIpcReceiver, CudaIpcSender
from .disk import DiskReceiver, DiskSender
from .layout import FORMAT
from .process_group import ProcessGroupReceiver, ProcessGroupSender
from .shared_memory import SharedMemoryReceiver, SharedMemorySender, remove_stale_segments

__all__ = [
    "Announcement",
    "BucketSender",
    "CudaIpcSender",
    "DiskSender",
    "ProcessGroupSender",
    "Receiver",
    "Sender",
    "SharedMemorySender",
    "TransportError",
    "TransportTimeout",
    "receiver",
    "remove_stale_segments",
]


def receiver(opened: Announcement, *, rank: int = 1) -> Receiver:
    """Return a worker's end of the transport whose sender announced an update.

    Args:
        opened: the announcement, as the sender's `open()` returned it.
        rank: the number of this worker among the engine's, from 1 on; each has its own.

    Errors: `TransportError` for a kind or a format that this release does not have;
        `UpdateDamaged` if the announcement lacks something; `ValueError` for a rank that the
        sender does not have.
    """
    if opened.get("format") != FORMAT:
        raise TransportError(
            f"the sender announces in format {opened.get('format')!r}, this receiver reads "
            f"{FORMAT}; install one release of megatron-idempotent at both ends"
        )
    kinds: dict[Any, Callable[[], Receiver]] = {
        DiskSender.kind: lambda: DiskReceiver(opened),
        SharedMemorySender.kind: lambda: SharedMemoryReceiver(opened),
        ProcessGroupSender.kind: lambda: ProcessGroupReceiver(opened, rank=rank),
        CudaIpcSender.kind: lambda: CudaIpcReceiver(opened),
        BucketSender.kind: lambda: BucketReceiver(opened),
    }
    if opened.get("kind") not in kinds:
        raise TransportError(
            f"the sender is of kind {opened.get('kind')!r}; there are {', '.join(kinds)}: install "
            "one release of megatron-idempotent at both ends"
        )
    try:
        return kinds[opened["kind"]]()
    except KeyError as error:
        raise UpdateDamaged(
            f"the sender's announcement lacks {error}; pass on what open() gave"
        ) from error
