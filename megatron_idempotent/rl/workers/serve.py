"""Runs a rank: dials the controller, makes the worker, and runs the methods that are called."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
import traceback
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

    Example: `RankConnection("unix:/run/user/1000/ranks", token, Hello(…)).serve(spec)`.
    """

    def __init__(
        self, address: str, token: bytes, hello: wire.Hello, *, timeout_s: float = 60.0
    ) -> None:
        """Dial the controller. Errors: `OSError` if nobody is there, `WireError` if it refuses."""
        self._rank = hello.rank
        self._connection = wire.connect(address, timeout_s)
        try:
            wire.introduce(self._connection, token, hello)
        except BaseException:
            self._connection.close()
            raise
        self._connection.settimeout(None)
        self._frames: queue.SimpleQueue[tuple[bytes, list[wire.Bytes]]] = queue.SimpleQueue()
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
            if kind == b"G":
                self._connection.close()  # for the controller, which goes no sooner
                return
            try:
                if kind == b"M":
                    if prepare is not None:
                        prepare()
                    worker = make_worker(spec)
                    answer = wire.dump(None)
                else:
                    answer = _run(worker, parts)
            except BaseException as error:  # noqa: BLE001 (told to the controller, who decides)
                self._send(b"E", wire.dump(describe(self._rank, error)))
                del error
            else:
                self._send(b"R", answer)
                del answer
            del parts  # or a large argument would live until the next call

    def _send(self, kind: bytes, parts: list[wire.Bytes]) -> None:
        try:
            wire.send_frame(self._connection, kind, parts)
        except OSError as error:
            _end(f"rank {self._rank}: the controller is gone: {error}")

    def _read(self) -> None:
        try:
            while True:
                kind, parts = wire.receive_frame(self._connection)
                self._frames.put((kind, parts))
                if kind == b"G":
                    return
                del parts
        except (EOFError, OSError, wire.WireError) as error:
            _end(f"rank {self._rank}: the controller has ended it, or is gone: {error}")


def make_worker(spec: WorkerSpec) -> Any:
    """Call the spec's factory, and return the worker.

    Errors: `ValueError` for a factory that is not `package.module:callable`; those of the factory.
    """
    module, _, name = spec.factory.partition(":")
    if not module or not name:
        raise ValueError(f"factory is {spec.factory!r}; allowed: package.module:callable")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found(spec.argument)


def describe(rank: int, error: BaseException) -> RankTraceback:
    """Return an exception in words, which can be read where its class is not known."""
    kind = type(error)
    try:
        message = str(error)
    except Exception as worse:  # noqa: BLE001 (an exception that cannot be printed is one too)
        message = f"(its message cannot be made: {worse!r})"
    return RankTraceback(
        rank=rank,
        exception_type=f"{kind.__module__}.{kind.__qualname__}",
        message=message,
        traceback="".join(traceback.format_exception(kind, error, error.__traceback__)),
    )


def run_method(worker: Any, method: str, args: tuple[Any, ...]) -> Any:
    """Call a worker's public method, and return its result.

    Errors: `AttributeError` if it has none of that name; those of the method.
    """
    found = None if method.startswith("_") else getattr(worker, method, None)
    if not callable(found):
        raise AttributeError(f"{type(worker).__qualname__} has no public method {method!r}")
    return found(*args)


def _run(worker: Any, parts: list[wire.Bytes]) -> list[wire.Bytes]:
    # The first part says how many of the others are the common argument's; the rest are our own.
    count = int.from_bytes(parts[0], "big")
    method, args = wire.load(parts[1 : 1 + count])
    own = parts[1 + count :]
    parts.clear()
    if own:
        args = (*args, wire.load(own))
    result = run_method(worker, method, args)
    try:
        return wire.dump(result)
    except Exception as error:
        raise TypeError(
            f"the result of {method}(), a {type(result).__qualname__}, cannot be pickled: {error}"
        ) from error


def _end(why: str) -> None:
    """End the process at once: the main thread may never come back from where it is."""
    with contextlib.suppress(OSError):
        os.write(2, f"{why}\n".encode())  # not sys.stderr, which the main thread may hold
    os._exit(ENDED)
