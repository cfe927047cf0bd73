"""Reads and writes folders of safetensors files, as Hugging Face checkpoints are."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .records import TensorInfo, WeightsError

if TYPE_CHECKING:
    from megatron_idempotent.weights.transports.layout import Layout

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


INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""safetensors' names of types, as far as checkpoints have them."""


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint, those of its index where it has one.

    Errors: `WeightsError` for a directory without safetensors files.
    """
    index = directory / INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    # Mistral's own format lies beside the same weights in Hugging Face's.
    files = [
        file
        for file in sorted(directory.glob("*.safetensors"))
        if not file.name.startswith("consolidated")
    ]
    if not files:
        raise WeightsError(
            f"{directory} has no *.safetensors, which say what an update is to bring; give the "
            "folder of the checkpoint that the engine was started with"
        )
    return files


def tensor_infos(directory: Path) -> tuple[TensorInfo, ...]:
    """All tensors of a checkpoint, in the order of its files; reads headers only.

    Errors: `WeightsError` for a directory without safetensors files, a file that is cut short, or
        a type that torch does not have.
    """
    return tuple(info for file in weight_files(directory) for info in _header(file))


def _header(file: Path) -> Iterator[TensorInfo]:
    """Eight bytes of length, little-endian, then JSON: names, types, shapes, places."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise WeightsError(f"{file} cannot be read ({error}); fetch it again") from error
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise WeightsError(f"{name} in {file} has type {entry['dtype']}: torch has none such")
        yield TensorInfo(name=name, shape=tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]])


def expected_tensors(
    directory: Path, *, dtype: torch.dtype, tied: bool = False
) -> tuple[TensorInfo, ...]:
    """Every tensor of an update, by its Hugging Face name, in the order of the checkpoint.

    Names and shapes are the checkpoint's. So are types, except that tensors of its most common
    floating type come in the one that the engine computes in: what is served is what was sent,
    and nothing is rounded on the way in.

    Args:
        dtype: that the engine computes in.
        tied: the output layer is the embedding, so `lm_head.weight` is not sent.

    Errors: those of `tensor_infos`.
    """
    infos = list(tensor_infos(directory))
    if tied:
        infos = [info for info in infos if info.name != "lm_head.weight"]
    counts = collections.Counter(
        info.dtype for info in infos if info.dtype.is_floating_point and info.dtype.itemsize > 1
    )
    main = counts.most_common(1)[0][0] if counts else dtype
    return tuple(
        dataclasses.replace(info, dtype=dtype if info.dtype == main else info.dtype)
        for info in infos
    )


def read_tensors(directory: Path) -> Mapping[str, torch.Tensor]:
    """The checkpoint's tensors, read from disk one by one as they are asked for."""
    return _OnDisk(directory)


class _OnDisk(Mapping[str, torch.Tensor]):
    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._open = {
            name: opened
            for file in weight_files(directory)
            for opened in [safe_open(str(file), framework="pt")]
            for name in opened.keys()  # type: ignore[no-untyped-call]  # noqa: SIM118 (no mapping)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


#: Weights, in any format: the files of the checkpoint that are not to be copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def copy_settings(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy config.json, tokenizer and all else at the top of a checkpoint that is not weights, nor
    their hashes."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((*_WEIGHTS, ".index.json", "SHA256SUMS")):
            shutil.copyfile(path, target / path.name)


def index_of(files: Mapping[str, Layout]) -> dict[str, Any]:
    """The content of model.safetensors.index.json: bytes in total, and each tensor's file."""
    return {
        "metadata": {
            "total_size": sum(info.nbytes for layout in files.values() for info in layout.tensors),
        },
        "weight_map": {
            info.name: name for name, layout in files.items() for info in layout.tensors
        },
    }
