"""Pickles of calls and results: one stream, and the bytes of large arrays and tensors beside it.

Free of torch until a tensor comes by: a controller on another machine may have none.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Bytes = bytes | bytearray | memoryview | mmap.mmap

#: Buffers below this many bytes stay in the stream: each one beside it costs a header and a read.
BESIDE = 16 << 10


def dump(value: Any) -> list[Bytes]:
    """Returns the stream, followed by the buffers that it refers to, which are not copied.

    Tensors of this process's memory come out dense, without what else is in their storage; two
    views of one storage come out as two tensors. Nothing in it needs Megatron to be read.

    Errors: whatever pickling raises; `ValueError` for a tensor on a device.
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
    """Returns what `dump` was given. Tensors and arrays keep the buffers, and may be written."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return _reduced(obj)
        if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            # Importing Megatron replaces the function that storages name.
            return _load_storage, obj.__reduce__()[1]
        return NotImplemented


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}; what travels between "
            "a controller and its ranks is on the CPU: call .cpu() on it"
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


def _load_storage(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)
