"""Reads and writes folders of safetensors files, as Hugging Face checkpoints are."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_idempotent.json_text import parse_json

from .records import TensorInfo, WeightsError, listed

NOTHING: Mapping[str, str] = MappingProxyType({})

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
"""Types by their names in safetensors, as far as checkpoints have them."""


SINGLE = "model.safetensors"
#: Types that are written, and their names.
_CODES = {dtype: code for code, dtype in DTYPES.items() if dtype.is_floating_point or code == "U8"}


class SafetensorsFile:
    """Writes one file of tensors that are announced before their contents come; keeps no tensor.

    The file has the bytes that `safetensors.torch.save_file` writes for tensors of one type. Of
    several types the wider come first, as there, so that all are aligned.

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
                raise ValueError(
                    f"{info.name} is {info.dtype}, which safetensors cannot hold: cast it to "
                    f"{', '.join(_CODES.values())}"
                )
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
        """Write an announced tensor, of any device. Errors: `ValueError` for another, or again."""
        info = self._missing.pop(name, None)
        if info is None or TensorInfo.of(name, tensor) != info:
            found = TensorInfo.of(name, tensor).describe()
            raise ValueError(
                f"{self.path.name}: {name} was written as {found}; "
                + (f"it has to be {info.describe()}" if info else "it is there already, or unknown")
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        self._file.seek(self._start + self._offsets[name])
        self._file.write(memoryview(flat.numpy()))

    @property
    def complete(self) -> bool:
        """True once all tensors have come."""
        return not self._missing

    def close(self) -> None:
        """Flush the file to the disk and close it. Errors: `ValueError` if tensors are missing."""
        if self._missing:
            raise ValueError(
                f"{self.path.name}: {', '.join(self._missing)} are missing; write() all tensors "
                "that were announced"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file, complete or not. Twice: no-op."""
        self._file.close()


class CheckpointDamaged(WeightsError):
    """Files are missing, cut short or unreadable; the message names them."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Errors: `CheckpointDamaged` naming the file."""
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} does not exist: is this a checkpoint's folder?") from None
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read as JSON ({error}): fetch it again"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointDamaged(
            f"{path} holds {type(found).__name__}, not an object: fetch it again"
        )
    return found


class Checkpoint(Mapping[str, torch.Tensor]):
    """Reads a checkpoint's tensors by name: from one file, or from several, with or without index.

    Files are open until `close()`; no tensor is read before it is asked for.

    Example:
        with Checkpoint(directory) as checkpoint:
            rows = checkpoint.read("lm_head.weight", dim=0, start=0, size=100)
            whole = checkpoint["lm_head.weight"]
    """

    def __init__(self, directory: str | Path) -> None:
        """Open the files.

        Errors: `CheckpointDamaged` listing files that are missing, cut short or unreadable, or
            naming a tensor of a type that torch does not have.
        """
        self.directory = Path(directory)
        self._files: dict[Path, Any] = {}
        self._file_by_name: dict[str, Path] = {}
        bad: list[str] = []
        for path, names in self._wanted().items():
            self._open(path, names, bad)
        if bad:
            self.close()
            raise CheckpointDamaged(f"{listed(bad)}: fetch the checkpoint again")
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._info(name) for name in self._file_by_name
        }

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        import safetensors

        path = self._file_by_name[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"{path}: {name} cannot be read ({error})") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_name)

    def __len__(self) -> int:
        return len(self._file_by_name)

    def close(self) -> None:
        """Close all files. Twice: no-op."""
        self._files.clear()  # which unmaps them

    def read(self, name: str, *, dim: int, start: int, size: int) -> torch.Tensor:
        """Return a range of a tensor along a dimension; no more of the file is read.

        Errors: `CheckpointDamaged` naming the file.
        """
        import safetensors

        path = self._file_by_name[name]
        chosen = (slice(None),) * dim + (slice(start, start + size),)
        try:
            rows: torch.Tensor = self._files[path].get_slice(name)[chosen]
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"{path}: {name} cannot be read ({error})") from error
        return rows

    def _wanted(self) -> dict[Path, list[str] | None]:
        """Return each file with the names that the index puts into it; None without an index."""
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            return {single: None}
        if not index.exists():
            # Mistral's own format lies beside the same weights in Hugging Face's.
            files = [
                file
                for file in sorted(self.directory.glob("*.safetensors"))
                if not file.name.startswith("consolidated")
            ]
            if not files:
                raise CheckpointDamaged(
                    f"{self.directory} has neither {SINGLE} nor {INDEX}, and has no *.safetensors: "
                    "is this a checkpoint's folder?"
                )
            return dict.fromkeys(files)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointDamaged(f"{index} has no weight_map: fetch it again")
        wanted: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            names = wanted.setdefault(self.directory / str(file), [])
            assert names is not None
            names.append(name)
        return wanted

    def _open(self, path: Path, names: list[str] | None, bad: list[str]) -> None:
        import safetensors  # `safe_open` itself is a class that cannot be pickled by reference

        try:
            file = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            # safetensors compares the file's length with what its header says.
            bad.append(f"{path} is missing, incomplete or damaged: it cannot be read ({error})")
            return
        self._files[path] = file
        there = set(file.keys())  # type: ignore[no-untyped-call]
        for name in sorted(there) if names is None else names:
            if name in there:
                self._file_by_name[name] = path
            else:
                bad.append(f"{path} lacks {name}, which {INDEX} says is in it")

    def _info(self, name: str) -> TensorInfo:
        path = self._file_by_name[name]
        found = self._files[path].get_slice(name)
        if found.get_dtype() not in DTYPES:
            raise CheckpointDamaged(
                f"{name} in {path} has type {found.get_dtype()}; types that can be read: "
                f"{', '.join(DTYPES)}"
            )
        dtype = DTYPES[found.get_dtype()]
        return TensorInfo(name=name, shape=tuple(found.get_shape()), dtype=dtype)


def expected_tensors(
    directory: Path, *, dtype: torch.dtype, tied: bool = False
) -> tuple[TensorInfo, ...]:
    """Return every tensor of an update, by its Hugging Face name.

    Names and shapes are the checkpoint's. So are types, except that tensors of its most common
    floating type come in the one that the engine computes in: what is served is what was sent,
    and nothing is rounded on the way in.

    Args:
        directory: the checkpoint that the engine serves.
        dtype: the type that the engine computes in.
        tied: True if the output layer is the embedding, so that `lm_head.weight` is not sent.

    Errors: those of `Checkpoint`.
    """
    with Checkpoint(directory) as checkpoint:
        infos = list(checkpoint.tensors.values())
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


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] = NOTHING,
    *,
    durable: bool,
) -> int:
    """Write tensors of any device to a file, and return its size in bytes.

    Tensors may share memory.

    Args:
        path: the file, which is replaced if it exists.
        tensors: the tensors by name.
        metadata: strings for the header, besides the "format" that transformers looks for.
        durable: True flushes the file to the disk, where other machines see it and it survives if
            this one goes down.

    Errors: `OSError`; `ValueError` for a type that safetensors does not store.
    """
    import safetensors.torch

    apart: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if dense.numel() and storage in taken else dense
        taken.add(storage)
    # Metadata alone is a broken header in safetensors 0.4.
    header = {"format": "pt", **metadata} if apart else None
    safetensors.torch.save_file(apart, path, header)
    if durable:
        flush(path)
    return path.stat().st_size


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON, and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def write_index(folder: Path, files: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Write the index of a folder, complete or not at all: each tensor's file, and metadata."""
    partial = folder / f".{INDEX}.partial"
    write_json(partial, {"metadata": dict(metadata), "weight_map": dict(sorted(files.items()))})
    os.replace(partial, folder / INDEX)


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: Weights, in any format: the files of the checkpoint that are not to be copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def copy_settings(source: Path, target: Path) -> None:
    """Copy config.json, the tokenizer and the other files at the top of a checkpoint.

    Weights, their indexes and hashes, and hidden files are left out.
    """
    for path in sorted(source.iterdir()):
        left_out = path.name.endswith((*_WEIGHTS, ".index.json", "SHA256SUMS"))
        if path.is_file() and not left_out and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
