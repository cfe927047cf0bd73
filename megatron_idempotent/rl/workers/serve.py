"""Runs a rank: dials the controller, makes the worker, and runs the methods that are called."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from . import wire
from .protocol import RankTraceback, WorkerSpec

#: Exit code of a rank whose controller is gone, or has ended it.
ENDED = 75


class RankConnection:
    """Connects a rank to its controller.

    A thread reads it all the time and ends the process when it breaks, wherever the main thread is,
    in a collective too. It touches neither pickles nor torch, so it can wait for neither.

    Example: `RankConnection("/run/user/1000/ranks", token, rank=0).serve(spec)`.
    """

    def __init__(
        self,
        address: wire.Address,
        token: bytes,
        rank: int,
        generation: str | None = "",
        *,
        timeout_s: float = 60.0,
    ) -> None:
        """Dial the controller. Errors: `OSError` if nobody is there, `WireError` if it refuses."""
        self._rank = rank
        self._connection = wire.connect(address, timeout_s)
        hello = wire.Hello(rank=rank, pid=os.getpid(), generation=generation)
        try:
            self.generation = wire.introduce(self._connection, token, hello, timeout_s)
        except BaseException:
            self._connection.close()
            raise
        self._frames: queue.SimpleQueue[wire.Frame] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="controller", daemon=True).start()

    def serve(self, spec: WorkerSpec, prepare: Callable[[], None] | None = None) -> None:
        """Make the worker when asked to, and answer calls until the controller says goodbye.

        Args:
            spec: the worker to make.
            prepare: runs before the factory; it may be a collective.
        """
        worker: Any = None
        while True:
            kind, parts = self._frames.get()
            if kind == wire.GOODBYE:
                self._connection.close()  # for the controller, which goes no sooner
                return
            try:
                if kind == wire.MAKE:
                    if prepare is not None:
                        prepare()
                    worker = _make(spec)
                    answer = wire.dump(None)
                else:
                    answer = _run(worker, parts)
            except BaseException as error:  # noqa: BLE001 (told to the controller, who decides)
                self._send(wire.ERROR, wire.dump(RankTraceback.of(self._rank, error)))
                del error
            else:
                self._send(wire.RESULT, answer)
                del answer
            del parts  # or a large argument would live until the next call

    def _send(self, kind: bytes, parts: list[wire.Bytes]) -> None:
        try:
            wire.send_frame(self._connection, kind, parts)
        except OSError as error:
            self._end(error)

    def _read(self) -> None:
        try:
            while True:
                kind, parts = wire.receive_frame(self._connection)
                self._frames.put((kind, parts))
                if kind == wire.GOODBYE:
                    return
                del parts
        except (EOFError, OSError) as error:
            self._end(error)

    def _end(self, why: Exception) -> None:
        """End the process at once: the main thread may never come back from where it is."""
        said = f"rank {self._rank}: the controller has ended it, or is gone: {why}\n"
        with contextlib.suppress(OSError):
            os.write(2, said.encode())  # not sys.stderr, which the main thread may hold
        os._exit(ENDED)


def _make(spec: WorkerSpec) -> Any:
    module, _, name = spec.factory.partition(":")
    if not module or not name:
        raise ValueError(f"factory is {spec.factory!r}; allowed: package.module:callable")
    make = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return make(spec.argument)  # type: ignore[operator]


def _run(worker: Any, parts: list[wire.Bytes]) -> list[wire.Bytes]:
    # The first part says how many of the others are the common argument's; the rest are our own.
    count = int.from_bytes(parts[0], "big")
    method, args = wire.load(parts[1 : 1 + count])
    own = parts[1 + count :]
    parts.clear()
    if own:
        args = (*args, wire.load(own))
    found = None if method.startswith("_") else getattr(worker, method, None)
    if not callable(found):
        raise AttributeError(f"{type(worker).__qualname__} has no public method {method!r}")
    result = found(*args)
    try:
        return wire.dump(result)
    except Exception as error:
        raise TypeError(
            f"the result of {method}(), a {type(result).__qualname__}, cannot be pickled: {error}"
        ) from error
