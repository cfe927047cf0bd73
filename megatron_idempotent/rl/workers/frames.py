"""Puts values into frames, which go over a pipe between a rank and its controller, or through Ray.

Large buffers, such as those of tensors, stay beside the pickle and are not copied for it.
Importing this imports neither torch nor Megatron.
"""

from __future__ import annotations

import io
import mmap
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_idempotent.proof.cpu.pool import StoragePickler

if TYPE_CHECKING:
    import torch


Bytes = bytes | bytearray | memoryview | mmap.mmap
Frame = tuple[bytes, list[Bytes]]
"""A kind, one of the bytes below, and parts."""
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


# A rank is ready, with its process id; it makes its worker, and is called until the controller says
# goodbye. It answers with a result or an error.
READY, MAKE, CALL, GOODBYE, RESULT, ERROR = b"Y", b"M", b"C", b"G", b"R", b"E"
#: A frame's kind and number of parts; then the length of each.
HEAD = struct.Struct("!cI")
LENGTH = struct.Struct("!Q")
#: A frame of fewer bytes is sent in one call, and copied for that.
_TOGETHER = 64 << 10
#: Memory from here on comes from the system, page by page as it is written.
_MAPPED = 1 << 20


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
