"""Files of safetensors that are written tensor by tensor, in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_idempotent.weights.records import TensorInfo

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
}


class SafetensorsFile:
    """One file whose tensors are known before their contents; no tensor is kept.

    Has the bytes that `safetensors.torch.save_file` writes of tensors of one type. With several,
    wider types come first there too, so that all are aligned.

    Example:
        file = SafetensorsFile(path, [TensorInfo.of("a", a)])
        file.write("a", a)
        file.close()
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        """Create the file. Errors: `ValueError` for a type that is not stored; `OSError`."""
        self.path = path
        self._missing = {info.name: info for info in infos}
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for info in sorted(infos, key=lambda info: (-info.dtype.itemsize, info.name)):
            if info.dtype not in _CODES:
                raise ValueError(f"{info.name} is {info.dtype}: checkpoints have no such type")
            self._offsets[info.name] = at
            header[info.name] = {
                "dtype": _CODES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [at, at + info.nbytes],
            }
            at += info.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put in a tensor, from whatever device. Errors: `ValueError` unless it is one to come."""
        info = self._missing.pop(name, None)
        if info is None or TensorInfo.of(name, tensor) != info:
            found = TensorInfo.of(name, tensor).describe()
            raise ValueError(
                f"{self.path.name}: {name} came as {found}, and was to come once, as "
                f"{info.describe() if info else 'nothing'}"
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        self._file.seek(self._start + self._offsets[name])
        self._file.write(memoryview(flat.numpy()))

    @property
    def complete(self) -> bool:
        """True once all tensors have come."""
        return not self._missing

    def close(self) -> None:
        """Have it on the disk. Errors: `ValueError` where tensors are missing."""
        if self._missing:
            raise ValueError(f"{self.path.name}: {', '.join(self._missing)} did not come")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close it as it is. Twice: no-op."""
        self._file.close()
