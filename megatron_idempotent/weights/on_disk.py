"""Reads which tensors a Hugging Face checkpoint has, from the headers of its safetensors files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from .errors import WeightsError
from .records import TensorInfo

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
