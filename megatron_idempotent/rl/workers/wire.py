"""Defines the bytes that a rank and its controller exchange: introductions, frames, and pickles.

Both prove that they know the token of the group before either reads a pickle of the other; the
token itself does not travel. Nothing is encrypted: use a network that is private to the run.

It imports torch only when a tensor comes by: a controller on another machine may have none.
"""

from __future__ import annotations

import dataclasses
import hmac
import io
import mmap
import pickle
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatron_idempotent.proof.cpu.pool import StoragePickler

if TYPE_CHECKING:
    import torch


Bytes = bytes | bytearray | memoryview | mmap.mmap

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


Kind = Literal[b"C", b"M", b"G", b"R", b"E"]
"""The kind of a frame: Call a method, Make the worker, Goodbye; Result, Error."""


class PicklableStruct(struct.Struct):
    """Adds pickling to `struct.Struct`, for callers who send this package by value."""

    def __reduce__(self) -> tuple[type[PicklableStruct], tuple[str]]:
        return type(self), (self.format,)


MAGIC = b"mi-rank1"
NONCE = 32
#: Magic word and nonce, which the controller begins with.
GREETING = PicklableStruct(f"!8s{NONCE}s")
#: Nonce, generation, rank, process id; then the proof.
HELLO = PicklableStruct(f"!{NONCE}s16siI")
PROOF = 32
#: A verdict, and how many bytes of UTF-8 with the reason follow.
VERDICT = PicklableStruct("!cH")
WELCOME, REFUSED = b"+", b"-"
#: The rank in a hello that only asks whether the controller is there.
PROBE = -1
#: A frame's kind and number of parts; then the length of each.
HEAD = PicklableStruct("!cI")
LENGTH = PicklableStruct("!Q")
#: Parts of one frame: a bound on what a torn head can ask for.
MOST_PARTS = 1 << 22
#: The most parts of a frame that the system takes in one call.
_AT_ONCE = 512
#: Memory from here on comes from the system, page by page as it is written.
_MAPPED = 1 << 20
#: Seconds for the introduction.
GREETING_S = 20.0


class WireError(RuntimeError):
    """The other side is not what it should be, or refused this one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Says which rank dials. Example: `Hello(generation=bytes(16), rank=0, pid=7)`."""

    generation: bytes
    """16 bytes that all ranks of one start have in common."""
    rank: int
    pid: int


def new_token() -> bytes:
    """Return a secret for a group."""
    return secrets.token_bytes(32)


def new_generation() -> bytes:
    """Return an id for one start of all ranks."""
    return secrets.token_bytes(16)


def rank_proof(token: bytes, greeting: bytes, hello: bytes) -> bytes:
    """Return bytes that prove that a rank has the token, for this connection only."""
    return hmac.digest(token, b"rank" + greeting + hello, "sha256")


def controller_proof(token: bytes, greeting: bytes, hello: bytes) -> bytes:
    """Return bytes that prove that the controller has the token, for this connection only."""
    return hmac.digest(token, b"controller" + greeting + hello, "sha256")


def heads(kind: bytes, parts: Sequence[Bytes]) -> bytes:
    """Return the bytes before the parts of a frame."""
    lengths = b"".join(LENGTH.pack(memoryview(part).nbytes) for part in parts)
    return HEAD.pack(kind, len(parts)) + lengths


def lengths_of(packed: Bytes) -> list[int]:
    """Return the lengths of all parts, from the bytes after `HEAD`."""
    return [length for (length,) in LENGTH.iter_unpack(packed)]


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to `unix:PATH` or `tcp:HOST:PORT`. Errors: `OSError`, `ValueError`."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(where)
        except BaseException:
            connection.close()
            raise
    elif kind == "tcp":
        host, _, port = where.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    else:
        raise ValueError(f"address is {address!r}; allowed: unix:PATH, tcp:HOST:PORT")
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


def introduce(connection: socket.socket, token: bytes, hello: Hello) -> None:
    """Do a rank's part of the introduction, with the socket's own timeout.

    Errors: `WireError` if the other side is no controller of this group, or refuses the rank.
    """
    greeting = receive(connection, GREETING.size)
    magic, _ = GREETING.unpack(greeting)
    if magic != MAGIC:
        raise WireError(
            f"the controller's address answers {magic!r}, not {MAGIC!r}: another program, or "
            "release of megatron-idempotent, listens there"
        )
    said = HELLO.pack(secrets.token_bytes(NONCE), hello.generation, hello.rank, hello.pid)
    connection.sendall(said + rank_proof(token, bytes(greeting), said))
    try:
        verdict, length = VERDICT.unpack(receive(connection, VERDICT.size))
    except EOFError:
        raise WireError("the controller has another token: it is not of this run") from None
    reason = receive(connection, length)
    proof = receive(connection, PROOF)
    if not hmac.compare_digest(proof, controller_proof(token, bytes(greeting), said)):
        raise WireError("what answers at the controller's address does not know the run's token")
    if verdict != WELCOME:
        raise WireError(f"the controller refuses rank {hello.rank}: {bytes(reason).decode()}")


def room(size: int) -> bytearray | mmap.mmap:
    """Return memory to receive into; a large one is not cleared first, which would take time."""
    if size < _MAPPED:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def receive(connection: socket.socket, size: int) -> bytearray | mmap.mmap:
    """Receive `size` bytes. Errors: `EOFError` if the connection ends before that; `OSError`."""
    got = room(size)
    view, at = memoryview(got), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError("the connection was closed")
        at += count
    return got


def receive_frame(connection: socket.socket) -> tuple[bytes, list[Bytes]]:
    """Return a frame's kind and parts.

    Errors: `EOFError`, `OSError`; `WireError` for a torn head.
    """
    kind, count = HEAD.unpack(receive(connection, HEAD.size))
    if count > MOST_PARTS:
        raise WireError(f"a frame has {count} parts; allowed: {MOST_PARTS} or fewer")
    lengths = lengths_of(receive(connection, count * LENGTH.size))
    return kind, [receive(connection, length) for length in lengths]


def send_frame(connection: socket.socket, kind: bytes, parts: Sequence[Bytes]) -> None:
    """Send a whole frame, without a copy of its parts. Errors: `OSError`."""
    waiting = [memoryview(heads(kind, parts)), *(memoryview(part).cast("B") for part in parts)]
    waiting = [view for view in waiting if view.nbytes]
    while waiting:
        sent = connection.sendmsg(waiting[:_AT_ONCE])
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]
