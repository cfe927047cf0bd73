"""Serializes values into frames, for a pipe between a rank and its controller, or for Ray.

Large buffers, such as those of tensors, are sent separately from the pickle, without a copy.
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
"""The kind, one of the constants below, and the parts."""
#: Buffers below this many bytes stay in the pickle: a separate buffer costs a header and a read.
BESIDE = 16 << 10


def dump(value: Any) -> list[Bytes]:
    """Pickle a value into a list of buffers: the pickle, followed by the value's large buffers,
    such as the memory of large tensors, which are not copied.

    Tensors are sent dense, without the rest of their storage; two views of one storage become two
    tensors. `load` does not need Megatron.

    Raises:
        ValueError: a tensor is not on the CPU.
        Exception: pickling failed.
    """
    buffers: list[pickle.PickleBuffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        try:
            large = buffer.raw().nbytes >= BESIDE
        except BufferError:  # not contiguous: pickle copies it into the stream
            large = False
        if large:
            buffers.append(buffer)
        return not large

    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=keep_inside).dump(value)
    # Not getbuffer(): its view in a garbage cycle crashes Python (seen with 3.12.1).
    return [out.getvalue(), *(buffer.raw() for buffer in buffers)]


def load(parts: Sequence[Bytes]) -> Any:
    """Return the value from the buffers that `dump` returned. Tensors and arrays in the value share
    the buffers' memory.
    """
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
    if not len(raw):  # torch rejects an empty buffer
        tensor = torch.empty(shape, dtype=kind)
    else:
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


# A rank sends READY with its process id. The controller sends MAKE, then CALLs, then GOODBYE; the
# rank replies to each MAKE and CALL with RESULT or ERROR.
READY, MAKE, CALL, GOODBYE, RESULT, ERROR = b"Y", b"M", b"C", b"G", b"R", b"E"
#: The header: a frame's kind and number of parts, followed by the length of each part.
#: As texts, because cloudpickle cannot pickle a `Struct` by value.
HEAD, LENGTH = "!cI", "!Q"
HEAD_SIZE, LENGTH_SIZE = map(struct.calcsize, (HEAD, LENGTH))
#: A frame of fewer bytes is copied into one buffer and sent in one call.
_TOGETHER = 64 << 10
#: Buffers from this size on are mapped, so that pages are allocated when they are written.
_MAPPED = 1 << 20


def packed(kind: bytes, parts: Sequence[Bytes]) -> list[Bytes]:
    """Return the buffers to send for a frame: a header with the kind and the lengths of the parts,
    then the parts. A small frame is one buffer; the parts of a large frame are not copied.
    """
    lengths = [len(part) for part in parts]
    head = struct.pack(HEAD, kind, len(parts)) + struct.pack(f"!{len(parts)}Q", *lengths)
    return [b"".join((head, *parts))] if sum(lengths) < _TOGETHER else [head, *parts]


def send_frame(connection: socket.socket, kind: bytes, parts: Sequence[Bytes]) -> None:
    """Send a frame, i.e. a kind and its parts, over a socket.

    Raises:
        OSError: the connection broke.
    """
    for buffer in packed(kind, parts):
        connection.sendall(buffer)


def receive_frame(connection: socket.socket) -> Frame:
    """Receive a frame from a socket; return its kind and parts.

    Raises:
        EOFError: the connection was closed.
        OSError: the connection broke.
    """
    kind, count = struct.unpack(HEAD, _receive(connection, HEAD_SIZE))
    lengths = struct.iter_unpack(LENGTH, _receive(connection, count * LENGTH_SIZE))
    return kind, [_receive(connection, length) for (length,) in lengths]


def _receive(connection: socket.socket, size: int) -> bytearray | mmap.mmap:
    got = room(size)
    view, offset = memoryview(got), 0
    while offset < size:
        count = connection.recv_into(view[offset:])
        if not count:
            raise EOFError("the connection was closed")
        offset += count
    return got


def room(size: int) -> bytearray | mmap.mmap:
    """Return a buffer of `size` bytes to receive into. A large buffer is memory-mapped, so that its
    pages are allocated only when they are written.
    """
    if size < _MAPPED:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
