"""Buckets through POSIX shared memory, to workers on the trainer's machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.weights.errors import UpdateDamaged
from megatron_idempotent.weights.records import Bucket, WeightUpdate

from .base import Announcement
from .errors import TransportError
from .layout import Layout, read_tensor
from .segments import DIRECTORY, PREFIX, Segment, remove_stale_segments
from .sending import SessionSender
from .two_segments import TwoSegments

KIND = "shared_memory"


class SharedMemorySender(SessionSender):
    """Writes each bucket into a segment that all workers read; up to two segments, used again.

    A bucket's segment is taken until `release(bucket)`, so at most two buckets are on their way.
    `open()` also removes the segments of trainers that died.
    """

    kind = KIND

    def _begin(self, update: WeightUpdate) -> tuple[TwoSegments, Mapping[str, Any]]:
        if not DIRECTORY.is_dir():
            raise TransportError(
                f"there is no {DIRECTORY}, so no shared memory; use DiskSender or "
                "ProcessGroupSender"
            )
        remove_stale_segments()
        return TwoSegments(update.id, make=Segment), {}


class SharedMemoryReceiver:
    """Copies buckets out of a trainer's segments.

    It opens them as the files that they are on Linux. `multiprocessing.shared_memory` would also
    hand them to this process's resource tracker, which before Python 3.13 unlinks them when this
    process ends, under the trainer's feet.
    """

    def __init__(self, opened: Announcement) -> None:
        self._update_id = str(opened["update"])

    def receive(self, announced: Announcement) -> Bucket:
        """See `Receiver.receive`."""
        layout = Layout.from_json(announced, update_id=self._update_id)
        name, expected = str(announced.get("segment")), announced.get("segment_bytes")
        if not name.startswith(f"{PREFIX}.") or "/" in name:
            raise UpdateDamaged(f"update {self._update_id}: {name!r} is not a trainer's segment")
        try:
            with open(DIRECTORY / name, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected or size < layout.nbytes:
                    raise EOFError(
                        f"it has {size} bytes, {expected} were announced for {layout.nbytes}"
                    )
                tensors = {
                    info.name: read_tensor(file.fileno(), info, offset)
                    for info, offset in zip(layout.tensors, layout.offsets, strict=True)
                }
        except FileNotFoundError as error:
            raise UpdateDamaged(
                f"update {self._update_id}: there is no segment {name}; does this worker share "
                f"{DIRECTORY} with the trainer, and is the update still open?"
            ) from error
        except (OSError, EOFError) as error:
            raise UpdateDamaged(
                f"update {self._update_id}: segment {name} cannot be read: {error}; send the "
                "update again"
            ) from error
        return layout.bucket(tensors)

    def close(self) -> None:
        """See `Receiver.close`."""
