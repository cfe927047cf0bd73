"""Serves a worker on a rank: makes it, and calls its methods as the controller asks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .frames import (
    CALL,
    ERROR,
    GOODBYE,
    READY,
    RESULT,
    Bytes,
    Frame,
    dump,
    load,
    receive_frame,
    send_frame,
)
from .protocol import RankTraceback, WorkerSpec

#: Exit code of a rank whose controller is gone, or has ended it.
ENDED = 75


class Served:
    """Answers the frames that a controller sends to one rank.

    Example: `kind, parts = Served(0, lambda: make_worker(spec)).answer(MAKE, [])`.
    """

    def __init__(self, rank: int, make: Callable[[], Any]) -> None:
        """Take the rank, and what makes its worker when the controller asks for that."""
        self._rank, self._make = rank, make
        self._worker: Any = None

    def answer(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Make the worker, or call its method; return the result, or the error in words."""
        try:
            if kind == CALL:
                return RESULT, self._call(parts)
            self._worker = self._make()
            return RESULT, dump(None)
        except BaseException as error:  # noqa: BLE001 (told to the controller, who decides)
            return ERROR, dump(RankTraceback.of(self._rank, error))

    def _call(self, parts: Sequence[Bytes]) -> list[Bytes]:
        # The first part says how many of the others are the common argument's; the rest are own.
        count = int.from_bytes(parts[0], "big")
        method, args = load(parts[1 : 1 + count])
        own = parts[1 + count :]
        if own:
            args = (*args, load(own))
        called = None if method.startswith("_") else getattr(self._worker, method, None)
        if not callable(called):
            kind = type(self._worker).__qualname__
            raise AttributeError(f"{kind} has no public method {method!r}")
        result = called(*args)
        try:
            return dump(result)
        except Exception as error:
            kind = type(result).__qualname__
            raise TypeError(
                f"the result of {method}(), a {kind}, cannot be pickled: {error}"
            ) from error


def make_worker(spec: WorkerSpec) -> Any:
    """Import the factory, and make the worker."""
    module, _, name = spec.factory.partition(":")
    if not module or not name:
        raise ValueError(f"factory is {spec.factory!r}; allowed: package.module:callable")
    make = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return make(spec.argument)  # type: ignore[operator]


def serve_pipe(pipe: socket.socket, served: Served) -> None:
    """Answer what comes through a rank's pipe until the controller says goodbye.

    A thread reads the pipe all the time and ends the process when it breaks, wherever the main
    thread is, in a collective too. It touches neither pickles nor torch, so it can wait for
    neither.
    """
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def read() -> None:
        try:
            kind = b""
            while kind != GOODBYE:
                frame = receive_frame(pipe)
                kind = frame[0]
                frames.put(frame)
                del frame
        except (EOFError, OSError) as error:
            _end(error)

    threading.Thread(target=read, name="controller", daemon=True).start()
    _send(pipe, READY, [os.getpid().to_bytes(8, "big")])
    while True:
        kind, parts = frames.get()
        if kind == GOODBYE:
            return
        answer = served.answer(kind, parts)
        del parts  # or a large argument would live until the next call
        _send(pipe, *answer)
        del answer


def _send(pipe: socket.socket, kind: bytes, parts: Sequence[Bytes]) -> None:
    try:
        send_frame(pipe, kind, parts)
    except OSError as error:
        _end(error)


def _end(why: Exception) -> None:
    """End the process at once: the main thread may never come back from where it is."""
    said = f"rank {os.environ.get('RANK')}: the controller has ended it, or is gone: {why}\n"
    with contextlib.suppress(OSError):
        os.write(2, said.encode())  # not sys.stderr, which the main thread may hold
    os._exit(ENDED)
