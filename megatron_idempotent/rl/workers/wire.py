"""Defines the bytes that a rank and its controller exchange: pickles, frames, and a first proof.

Both prove that they know the token of the group before either reads a pickle of the other; the
token itself does not travel. `multiprocessing.connection` does that, and no more: it would copy a
large message twice, and hand out memory that a tensor cannot write to. Nothing is encrypted: use a
network that is private to the run.

It imports torch only when a tensor comes by: a controller on another machine may have none.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from megatron_idempotent.proof.cpu.pool import StoragePickler

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
