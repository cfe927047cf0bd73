"""Sends buckets from a trainer to an engine's workers, as JSON and raw bytes.

Nothing is pickled, so the two ends may have different versions of Python and torch.
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
    """Return a receiver for the transport that a sender's announcement names.

    Args:
        opened: the result of the sender's `open()`.
        rank: this worker's rank among the engine's workers, from 1.
        expected: every tensor of the model, to check and bound what is received; None for no check.
        bucket: the URL below which a `BucketSender` may have its objects; other URLs are rejected,
            and with an empty one all are.

    Raises:
        TransportError: this release lacks the sender's kind or format, or its objects are not below
            `bucket`.
        UpdateDamaged: the announcement is malformed, or the sender has no such rank.
    """
    if not isinstance(opened, Mapping) or opened.get("format") != FORMAT:
        sender_format = opened.get("format") if isinstance(opened, Mapping) else opened
        raise TransportError(
            f"the sender announces in format {reprlib.repr(sender_format)}, this receiver reads "
            f"{FORMAT}; install one release of megatron-idempotent at both ends"
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
    end = kinds[kind]()
    if expected is not None:
        end.expected = {info.name: info for info in expected}
    return end
