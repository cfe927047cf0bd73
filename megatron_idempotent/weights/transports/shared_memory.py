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

KIND = "shared_memory"
#: One that workers read while the next bucket is written.
_SEGMENTS = 2


class SharedMemorySender(SessionSender):
    """Writes each bucket into a segment that all workers read; up to two segments, used again.

    A bucket's segment is taken until `release(bucket)`, so at most two buckets are on their way.
    `open()` also removes the segments of trainers that died.
    """

    kind = KIND

    def _begin(self, update: WeightUpdate) -> tuple[_Segments, Mapping[str, Any]]:
        if not DIRECTORY.is_dir():
            raise TransportError(
                f"there is no {DIRECTORY}, so no shared memory; use DiskSender or "
                "ProcessGroupSender"
            )
        remove_stale_segments()
        return _Segments(update.id), {}


class _Segments:
    def __init__(self, update_id: str) -> None:
        self._update_id = update_id
        self._free: list[Segment] = []
        self._taken: dict[int, Segment] = {}

    def announce(self, layout: Layout, bucket: Bucket) -> Mapping[str, Any]:
        self.release(layout.index)  # of a first try
        segment = self._segment(layout.nbytes)
        self._taken[layout.index] = segment
        layout.pack(bucket.tensors, segment.flat_N)
        return {"segment": segment.name, "segment_bytes": segment.nbytes}

    def _segment(self, nbytes: int) -> Segment:
        if len(self._taken) == _SEGMENTS:
            raise TransportError(
                f"update {self._update_id}: buckets {sorted(self._taken)} hold both segments; "
                "release() one, once its workers have it"
            )
        for place, segment in enumerate(self._free):
            if segment.nbytes >= nbytes:
                return self._free.pop(place)
        if len(self._taken) + len(self._free) == _SEGMENTS:
            self._free.pop().unlink()  # too small
        return Segment(nbytes)

    def transmit(self, layout: Layout, bucket: Bucket) -> None:
        pass

    def release(self, index: int) -> None:
        if index in self._taken:
            self._free.append(self._taken.pop(index))

    def close(self) -> None:
        for segment in (*self._free, *self._taken.values()):
            segment.unlink()


class SharedMemoryReceiver:
    """Copies buckets out of a trainer's segments.

    It opens them as the files that they are on Linux. `multiprocessing.shared_memory` would also
    hand them to this process's resource tracker, which before Python 3.13 unlinks them when this
    process ends, under the trainer's feet.
    """

    def __init__(self, opened: Announcement) -> None:
        self._update_id = str(opened["update"])

    def receive(self, announced: Announcement) -> Bucket:
        """As `Receiver.receive`."""
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
        """As `Receiver.close`."""
