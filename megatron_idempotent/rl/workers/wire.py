"""Connects a rank to its controller: pickles, frames, a first proof, and the calls that it serves.

Both prove that they know the token of the group before either reads a pickle of the other; the
token itself does not travel. `multiprocessing.connection` does that, and no more: it would copy a
large message twice, and hand out memory that a tensor cannot write to. Nothing is encrypted: use a
network that is private to the run.

It imports torch only when a tensor comes by: a controller on another machine may have none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import mmap
import os
import pickle
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from megatron_idempotent.proof.cpu.pool import StoragePickler

from .protocol import RankTraceback, WorkerSpec

if TYPE_CHECKING:
    import torch


Bytes = bytes | bytearray | memoryview | mmap.mmap
Frame = tuple[bytes, list[Bytes]]
"""A kind, one of the bytes below, and parts."""
Address = str | tuple[str, int]
"""The path of a Unix socket, or host and port."""

#: Buffers below this many bytes stay in the stream: each one beside it costs a header and a read.
BESIDE = 16 << 10


def dump(value: Any) -> list[Bytes]:
    """Pickle a value: returns the stream, followed by large buffers, which are not copied.

    Tensors come out dense, without the rest of their storage; two views of one storage come out as
    two tensors. Reading it does not need Megatron.

    Errors: those of pickling; `ValueError` for a tensor that is not on the CPU.
    """
    beside: list[pickle.PickleBuffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        try:
            large = buffer.raw().nbytes >= BESIDE
        except BufferError:  # not contiguous: pickle copies it into the stream
            large = False
        if large:
            beside.append(buffer)
        return not large

    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=keep_inside).dump(value)
    # Not getbuffer(): its view in a cycle of garbage brings Python down (seen with 3.12.1).
    return [out.getvalue(), *(buffer.raw() for buffer in beside)]


def load(parts: Sequence[Bytes]) -> Any:
    """Return the value that `dump` was given; its tensors and arrays use the buffers' memory."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(StoragePickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return _reduced(obj)
        return super().reducer_override(obj)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}; between a controller "
            "and its ranks tensors travel on the CPU: call .cpu() on it"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    raw = pickle.PickleBuffer(dense.reshape(-1).view(torch.uint8).numpy())
    return _tensor, (raw, dtype, tuple(tensor.shape), tensor.requires_grad)


def _tensor(raw: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype)
    if not len(raw):  # torch makes no tensor of an empty buffer
        made = torch.empty(shape, dtype=kind)
    else:
        made = torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)
    return made.requires_grad_() if requires_grad else made


class PicklableStruct(struct.Struct):
    """Adds pickling to `struct.Struct`, for callers who send this package by value."""

    def __reduce__(self) -> tuple[type[PicklableStruct], tuple[str]]:
        return type(self), (self.format,)


# A rank says hello, and is welcome or refused; then it makes its worker, and is called until the
# controller says goodbye. It answers with a result or an error.
HELLO, WELCOME, REFUSED = b"H", b"W", b"N"
MAKE, CALL, GOODBYE, RESULT, ERROR = b"M", b"C", b"G", b"R", b"E"
#: A frame's kind and number of parts; then the length of each.
HEAD = PicklableStruct("!cI")
LENGTH = PicklableStruct("!Q")
#: A frame of fewer bytes is sent in one call, and copied for that.
_TOGETHER = 64 << 10
#: Memory from here on comes from the system, page by page as it is written.
_MAPPED = 1 << 20
#: Seconds in which the other side of a new connection has to prove that it knows the token.
PROOF_S = 20.0


class WireError(RuntimeError):
    """The other side is not what it should be, or refused this one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Says which rank dials. Example: `Hello(rank=0, pid=7)`."""

    rank: int
    pid: int
    generation: str | None = ""
    """The id that all ranks of one start have in common. With None, rank 0 begins a new start."""


def connect(address: Address, timeout_s: float) -> socket.socket:
    """Return a connection to an address. Errors: `OSError`."""
    if not isinstance(address, str):
        connection = socket.create_connection((address[0], address[1]), timeout=timeout_s)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Set large buffers, and limit to half a minute how long a dead machine goes unnoticed."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def introduce(connection: socket.socket, token: bytes, hello: Hello, timeout_s: float) -> str:
    """Do a rank's part of the introduction; return the id of the start that it belongs to.

    Errors: `WireError` if the other side is no controller of this run, or refuses the rank;
        `OSError` if it does not answer in time.
    """
    _limit_waits(connection, timeout_s)
    with Connection(os.dup(connection.fileno())) as link:
        try:
            answer_challenge(link, token)
        except (AuthenticationError, AssertionError, EOFError) as error:
            raise WireError(
                f"the controller has another token, or another program listens there: {error!r}"
            ) from error
        try:
            deliver_challenge(link, token)
        except AuthenticationError as error:
            raise WireError(
                "what answers at the controller's address does not know the run's token"
            ) from error
    send_frame(connection, HELLO, dump(hello))
    kind, parts = receive_frame(connection)
    said: str = load(parts)
    if kind != WELCOME:
        raise WireError(f"the controller refuses rank {hello.rank}: {said}")
    _limit_waits(connection, 0.0)
    return said


def meet(connection: socket.socket, token: bytes) -> Hello:
    """Do the controller's part up to the rank's hello, which it then has to answer.

    Errors: `WireError` for one who does not know the token; `OSError`, `EOFError`.
    """
    _limit_waits(connection, PROOF_S)
    with Connection(os.dup(connection.fileno())) as link:
        try:
            deliver_challenge(link, token)
            answer_challenge(link, token)
        except (AuthenticationError, AssertionError) as error:
            raise WireError("one with another token") from error
    _, parts = receive_frame(connection)
    hello: Hello = load(parts)
    return hello


def _limit_waits(connection: socket.socket, limit_s: float) -> None:
    """Bound each wait for bytes, 0 for none; not by Python's timeouts, which `Connection` lacks."""
    connection.setblocking(True)
    seconds, rest = divmod(limit_s, 1)
    limit = struct.pack("ll", int(seconds), int(rest * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def packed(kind: bytes, parts: Sequence[Bytes]) -> list[Bytes]:
    """Return the buffers to send for a frame, in which large parts are not copied."""
    lengths = [len(part) for part in parts]
    head = HEAD.pack(kind, len(parts)) + b"".join(map(LENGTH.pack, lengths))
    return [b"".join((head, *parts))] if sum(lengths) < _TOGETHER else [head, *parts]


def send_frame(connection: socket.socket, kind: bytes, parts: Sequence[Bytes]) -> None:
    """Send a whole frame. Errors: `OSError`."""
    for buffer in packed(kind, parts):
        connection.sendall(buffer)


def receive_frame(connection: socket.socket) -> Frame:
    """Return a frame's kind and parts. Errors: `EOFError`, `OSError`."""
    kind, count = HEAD.unpack(_receive(connection, HEAD.size))
    lengths = LENGTH.iter_unpack(_receive(connection, count * LENGTH.size))
    return kind, [_receive(connection, length) for (length,) in lengths]


def _receive(connection: socket.socket, size: int) -> bytearray | mmap.mmap:
    got = room(size)
    view, at = memoryview(got), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError("the connection was closed")
        at += count
    return got


def room(size: int) -> bytearray | mmap.mmap:
    """Return memory to receive into; a large one is not cleared first, which would take time."""
    if size < _MAPPED:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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
        address: Address,
        token: bytes,
        rank: int,
        generation: str | None = "",
        *,
        timeout_s: float = 60.0,
    ) -> None:
        """Dial the controller. Errors: `OSError` if nobody is there, `WireError` if it refuses."""
        self._rank = rank
        self._connection = connect(address, timeout_s)
        hello = Hello(rank=rank, pid=os.getpid(), generation=generation)
        try:
            self.generation = introduce(self._connection, token, hello, timeout_s)
        except BaseException:
            self._connection.close()
            raise
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
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
            if kind == GOODBYE:
                self._connection.close()  # for the controller, which goes no sooner
                return
            try:
                if kind == MAKE:
                    if prepare is not None:
                        prepare()
                    worker = _make(spec)
                    answer = dump(None)
                else:
                    answer = _run(worker, parts)
            except BaseException as error:  # noqa: BLE001 (told to the controller, who decides)
                self._send(ERROR, dump(RankTraceback.of(self._rank, error)))
                del error
            else:
                self._send(RESULT, answer)
                del answer
            del parts  # or a large argument would live until the next call

    def _send(self, kind: bytes, parts: list[Bytes]) -> None:
        try:
            send_frame(self._connection, kind, parts)
        except OSError as error:
            self._end(error)

    def _read(self) -> None:
        try:
            while True:
                kind, parts = receive_frame(self._connection)
                self._frames.put((kind, parts))
                if kind == GOODBYE:
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


def _run(worker: Any, parts: list[Bytes]) -> list[Bytes]:
    # The first part says how many of the others are the common argument's; the rest are our own.
    count = int.from_bytes(parts[0], "big")
    method, args = load(parts[1 : 1 + count])
    own = parts[1 + count :]
    parts.clear()
    if own:
        args = (*args, load(own))
    found = None if method.startswith("_") else getattr(worker, method, None)
    if not callable(found):
        raise AttributeError(f"{type(worker).__qualname__} has no public method {method!r}")
    result = found(*args)
    try:
        return dump(result)
    except Exception as error:
        raise TypeError(
            f"the result of {method}(), a {type(result).__qualname__}, cannot be pickled: {error}"
        ) from error
