"""Moves buckets from a trainer to an engine's workers, as JSON and raw bytes.

Both ends may run another Python and another torch: nothing is pickled.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_idempotent.rl.weights.records import TensorInfo

from .base import Announcement, Receiver, Sender, TransportError, TransportTimeout
from .bucket import BucketReceiver, BucketSender
from .cuda_ipc import CudaIpcReceiver, CudaIpcSender
from .disk import DiskReceiver, DiskSender
from .layout import FORMAT
from .process_group import ProcessGroupReceiver, ProcessGroupSender
from .several import KIND as SEVERAL
from .several import SeveralReceiver
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


def receiver(
    opened: Announcement,
    *,
    rank: int = 1,
    expected: Iterable[TensorInfo] | None = None,
    bucket: str = "",
) -> Receiver:
    """Return a worker's end of the transport whose sender announced an update.

    Args:
        opened: the announcement, as the sender's `open()` returned it.
        rank: the number of this worker among the engine's, from 1 on; each has its own.
        expected: every tensor of the model, which bounds what is received; None for no bound.
        bucket: the URL at or below which a `BucketSender` may have its objects; nothing else is
            opened, and empty is nothing.

    Errors: `TransportError` for a kind or a format that this release does not have, and for objects
        elsewhere; `UpdateDamaged` if the announcement lacks something, or the sender has no such
        rank.
    """
    if not isinstance(opened, Mapping) or opened.get("format") != FORMAT:
        found = opened.get("format") if isinstance(opened, Mapping) else opened
        raise TransportError(
            f"the sender announces in format {reprlib.repr(found)}, this receiver reads {FORMAT}; "
            "install one release of megatron-idempotent at both ends"
        )
    kinds: dict[Any, Callable[[], Receiver]] = {
        DiskSender.kind: lambda: DiskReceiver(opened),
        SharedMemorySender.kind: lambda: SharedMemoryReceiver(opened),
        ProcessGroupSender.kind: lambda: ProcessGroupReceiver(opened, rank=rank),
        CudaIpcSender.kind: lambda: CudaIpcReceiver(opened),
        BucketSender.kind: lambda: BucketReceiver(opened, bucket),
        SEVERAL: lambda: SeveralReceiver(
            opened, functools.partial(receiver, rank=rank, expected=expected, bucket=bucket)
        ),
    }
    kind = opened.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise TransportError(
            f"the sender is of kind {reprlib.repr(kind)}; there are {', '.join(kinds)}: install "
            "one release of megatron-idempotent at both ends"
        )
    made = kinds[kind]()
    if expected is not None:
        made.expected = {info.name: info for info in expected}
    return made
