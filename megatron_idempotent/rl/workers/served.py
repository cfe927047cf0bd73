"""Serves a worker on a rank: constructs it, and executes the controller's calls."""

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

#: The exit code of a rank that its controller ended, or whose controller died.
ENDED = 75


class Served:
    """Executes on one rank the frames that the controller sends to it: constructs the worker, and
    calls its methods.

    Example: `kind, parts = Served(0, lambda: make_worker(spec)).answer(MAKE, [])`.
    """

    def __init__(self, rank: int, make: Callable[[], Any]) -> None:
        """Store the rank, and `make`, the function that constructs the rank's worker when `answer`
        gets a MAKE frame.
        """
        self._rank, self._make = rank, make
        self._worker: Any = None

    def answer(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Execute a MAKE frame, which constructs the worker, or a CALL frame, which calls a method
        of the worker. Return a frame with the result, or with the error as text.
        """
        try:
            if kind == CALL:
                return RESULT, self._call(parts)
            self._worker = self._make()
            return RESULT, dump(None)
        except BaseException as error:  # noqa: BLE001 (the controller raises it)
            return ERROR, dump(RankTraceback.of(self._rank, error))

    def _call(self, parts: Sequence[Bytes]) -> list[Bytes]:
        # The first part has the number of common parts; the parts after those are this rank's own.
        count = int.from_bytes(parts[0], "big")
        method, args = load(parts[1 : 1 + count])
        argument = parts[1 + count :]
        if argument:
            args = (*args, load(argument))
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
    """Import the factory that `spec` names, and return the worker that it makes.

    Raises:
        ValueError: `spec.factory` is not `package.module:callable`.
        Exception: the error of the import or the factory.
    """
    module, _, name = spec.factory.partition(":")
    if not module or not name:
        raise ValueError(f"factory is {spec.factory!r}; allowed: package.module:callable")
    make = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return make(spec.argument)  # type: ignore[operator]


def serve_pipe(pipe: socket.socket, served: Served) -> None:
    """Execute the frames that the controller sends through a rank's pipe, and send the replies,
    until GOODBYE.

    A thread reads the pipe continuously, and ends the process if the pipe breaks, even while the
    main thread is in a collective. The thread uses neither pickle nor torch, which could block it.
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
        del parts  # else a large argument stays in memory until the next call
        _send(pipe, *answer)
        del answer


def _send(pipe: socket.socket, kind: bytes, parts: Sequence[Bytes]) -> None:
    try:
        send_frame(pipe, kind, parts)
    except OSError as error:
        _end(error)


def _end(reason: Exception) -> None:
    """Print the reason, and end this rank's process at once, because the main thread may hang in a
    collective.
    """
    text = f"rank {os.environ.get('RANK')}: the controller has ended it, or is gone: {reason}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())  # not sys.stderr, which the main thread may hold
    os._exit(ENDED)
