"""Emulates streams and events of a device that finishes every call before it returns.

Importing this does not import torch.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from megatron_idempotent.patching.base import PerProcess

from .errors import NotEmulatedError

_ids = itertools.count()


class Event:
    """Marks a point in time. `elapsed_time` is measured wall time in milliseconds."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess:
            raise NotEmulatedError("torch.cuda.Event(interprocess=True)")
        self.enable_timing = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event's `record` to that of `end_event`.

        Raises RuntimeError, as CUDA does, if either event was not recorded or has no timing.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be created with enable_timing=True")
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("both events must be recorded before elapsed_time()")
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def ipc_handle(self) -> bytes:
        raise NotEmulatedError("torch.cuda.Event.ipc_handle")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        raise NotEmulatedError("torch.cuda.Event.from_ipc_handle")


class Stream:
    """Emulates an order of work, all of which is always done already."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        self.device = device
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_ids)
        self._outer: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_event(self, event: Event) -> None:
        return None

    def wait_stream(self, stream: Stream) -> None:
        return None

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        set_stream(self._outer.pop())


_default = Stream()


class _Current(PerProcess, threading.local):
    stream: Stream = _default


_current = _Current(__name__, "_current")


class StreamContext:
    """Makes s the current stream in a block, `with torch.cuda.stream(s)`; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._outer = _current.stream
        set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        set_stream(self._outer)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    return _current.stream


def default_stream(device: Any = None) -> Stream:
    return _default


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _current.stream = stream
