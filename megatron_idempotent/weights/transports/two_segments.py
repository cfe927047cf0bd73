"""Two pieces of memory that buckets take in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from megatron_idempotent.weights.records import Bucket

from .errors import TransportError
from .layout import Layout

#: One that workers read while the next bucket is written.
_SEGMENTS = 2


class Memory(Protocol):
    """Memory that other processes can open."""

    nbytes: int
    flat_N: torch.Tensor
    """All of it, as bytes (uint8)."""

    def announced(self) -> Mapping[str, Any]:
        """Returns the JSON with which a receiver opens it."""
        ...

    def unlink(self) -> None:
        """Give it back."""
        ...


class TwoSegments:
    """An update's buckets, each in one of two segments until it is released."""

    def __init__(
        self,
        update_id: str,
        *,
        make: Callable[[int], Memory],
        copying: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """
        Args:
            update_id: for errors.
            make: makes memory of at least the given number of bytes.
            copying: the context in which a bucket is copied.
        """
        self._update_id, self._make, self._copying = update_id, make, copying
        self._free: list[Memory] = []
        self._taken: dict[int, Memory] = {}

    def announce(self, layout: Layout, bucket: Bucket) -> Mapping[str, Any]:
        """See `Session.announce`."""
        self.release(layout.index)  # of a first try
        segment = self._segment(layout.nbytes)
        self._taken[layout.index] = segment
        with self._copying():
            layout.pack(bucket.tensors, segment.flat_N)
        return segment.announced()

    def _segment(self, nbytes: int) -> Memory:
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
        return self._make(nbytes)

    def transmit(self, layout: Layout, bucket: Bucket) -> None:
        """Does nothing: workers read the segment."""

    def release(self, index: int) -> None:
        """See `Session.release`."""
        if index in self._taken:
            self._free.append(self._taken.pop(index))

    def close(self) -> None:
        """See `Session.close`."""
        for segment in (*self._free, *self._taken.values()):
            segment.unlink()
        self._free.clear()
        self._taken.clear()
