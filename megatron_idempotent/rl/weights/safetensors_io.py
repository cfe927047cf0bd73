"""Reads and writes folders of safetensors files, such as Hugging Face checkpoints."""

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
"""The dtypes of checkpoints, by their names in safetensors."""


SINGLE = "model.safetensors"
#: The dtypes that can be written, and their names.
_CODES = {dtype: code for code, dtype in DTYPES.items() if dtype.is_floating_point or code == "U8"}


class SafetensorsFile:
    """Writes a safetensors file one tensor at a time: the header first, then the tensors in any
    order.

    For tensors of one dtype, the bytes equal those of `safetensors.torch.save_file`. As there,
    wider dtypes come first, so that all tensors are aligned.

    Example:
        file = SafetensorsFile(path, [TensorInfo.of("a", a)])
        file.write("a", a)
        file.close()
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        """Create the file, and write a header for the tensors that `infos` describes.

        Raises:
            ValueError: safetensors cannot store a dtype.
            OSError: the file cannot be written.
        """
        self.path = path
        self._missing = {info.name: info for info in infos}
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in sorted(infos, key=lambda info: (-info.dtype.itemsize, info.name)):
            if info.dtype not in _CODES:
                raise ValueError(
                    f"{info.name} is {info.dtype}, which safetensors cannot hold: cast it to "
                    f"{', '.join(_CODES.values())}"
                )
            self._offsets[info.name] = offset
            header[info.name] = {
                "dtype": _CODES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, offset + info.nbytes],
            }
            offset += info.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the data of one tensor that the header lists, from any device.

        Raises:
            ValueError: the tensor is not in the header, differs from it, or was written before.
        """
        info = self._missing.pop(name, None)
        if info is None or TensorInfo.of(name, tensor) != info:
            actual = TensorInfo.of(name, tensor).describe()
            raise ValueError(
                f"{self.path.name}: {name} was written as {actual}; "
                + (f"it has to be {info.describe()}" if info else "it is there already, or unknown")
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        self._file.seek(self._start + self._offsets[name])
        self._file.write(memoryview(flat.numpy()))

    @property
    def complete(self) -> bool:
        """True once all tensors of the header are written."""
        return not self._missing

    def close(self) -> None:
        """Flush the file to the disk and close it, if all tensors of the header are written;
        otherwise raise an error.

        Raises:
            ValueError: tensors are missing.
        """
        if self._missing:
            raise ValueError(
                f"{self.path.name}: {', '.join(self._missing)} are missing; write() all tensors "
                "that were announced"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file without a check that all tensors are written. A second call is a no-op."""
        self._file.close()


class CheckpointDamaged(WeightsError):
    """Files of a checkpoint are missing, truncated or unreadable; the message lists them."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint, and return its content, a JSON object, as a dict.

    Raises:
        CheckpointDamaged: the file is missing or is not a JSON object.
    """
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} does not exist: is this a checkpoint's folder?") from None
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read as JSON ({error}): fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointDamaged(
            f"{path} holds {type(content).__name__}, not an object: fetch it again"
        )
    return content


class Checkpoint(Mapping[str, torch.Tensor]):
    """Reads the tensors of a checkpoint folder by name, from one or several safetensors files, with
    or without an index.

    Files stay open until `close()`. Tensors are read on access.

    Example:
        with Checkpoint(directory) as checkpoint:
            rows = checkpoint.read("lm_head.weight", dim=0, start=0, size=100)
            whole = checkpoint["lm_head.weight"]
    """

    def __init__(self, directory: str | Path) -> None:
        """Open the checkpoint's files, and read the name, shape and dtype of each tensor.

        Raises:
            CheckpointDamaged: files are missing, truncated or unreadable, or a tensor has a dtype
                that torch lacks.
        """
        self.directory = Path(directory)
        self._files: dict[Path, Any] = {}
        self._file_by_name: dict[str, Path] = {}
        bad: list[str] = []
        for path, names in self._names_by_file().items():
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
        """Close all files of the checkpoint. A second call is a no-op."""
        self._files.clear()  # unmaps them

    def read(self, name: str, *, dim: int, start: int, size: int) -> torch.Tensor:
        """Read a range of a tensor along the dimension `dim` from the file, without the rest of the
        tensor, and return it.

        Raises:
            CheckpointDamaged: the file cannot be read.
        """
        import safetensors

        path = self._file_by_name[name]
        index = (slice(None),) * dim + (slice(start, start + size),)
        try:
            rows: torch.Tensor = self._files[path].get_slice(name)[index]
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"{path}: {name} cannot be read ({error})") from error
        return rows

    def _names_by_file(self) -> dict[Path, list[str] | None]:
        """Return the checkpoint's safetensors files, each with the names of its tensors according
        to the index, or with None if there is no index.
        """
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            return {single: None}
        if not index.exists():
            # Mistral's own files have the same weights as those in Hugging Face's format.
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
        names_by_file: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            names = names_by_file.setdefault(self.directory / str(file), [])
            assert names is not None
            names.append(name)
        return names_by_file

    def _open(self, path: Path, names: list[str] | None, bad: list[str]) -> None:
        import safetensors  # `safe_open` itself is a class that cannot be pickled by reference

        try:
            file = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            # safetensors checks the file's length against its header.
            bad.append(f"{path} is missing, incomplete or damaged: it cannot be read ({error})")
            return
        self._files[path] = file
        stored_names = set(file.keys())  # type: ignore[no-untyped-call]
        for name in sorted(stored_names) if names is None else names:
            if name in stored_names:
                self._file_by_name[name] = path
            else:
                bad.append(f"{path} lacks {name}, which {INDEX} says is in it")

    def _info(self, name: str) -> TensorInfo:
        path = self._file_by_name[name]
        stored = self._files[path].get_slice(name)
        if stored.get_dtype() not in DTYPES:
            raise CheckpointDamaged(
                f"{name} in {path} has type {stored.get_dtype()}; types that can be read: "
                f"{', '.join(DTYPES)}"
            )
        dtype = DTYPES[stored.get_dtype()]
        return TensorInfo(name=name, shape=tuple(stored.get_shape()), dtype=dtype)


def expected_tensors(
    directory: Path, *, dtype: torch.dtype, tied: bool = False
) -> tuple[TensorInfo, ...]:
    """Return the name, shape and dtype of each tensor that a full update must have for an engine
    that serves the checkpoint in `directory`.

    Names, shapes and dtypes are the checkpoint's, except that tensors of its most common
    floating-point dtype have the engine's dtype: the engine then serves the sent bits without
    rounding.

    Args:
        directory: the checkpoint that the engine serves.
        dtype: the dtype that the engine computes in.
        tied: True if the output layer shares the embedding, so that `lm_head.weight` is not sent.

    Raises:
        CheckpointDamaged: as in `Checkpoint`.
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
    """Write tensors from any device to a safetensors file, and return the file's size in bytes.

    Tensors may share memory.

    Args:
        path: the file, which is replaced if it exists.
        tensors: the tensors by name.
        metadata: strings for the header, in addition to the "format" that transformers requires.
        durable: True to flush the file to the disk, so that other machines see it and it survives a
            crash of this one.

    Raises:
        OSError: the file cannot be written.
        ValueError: safetensors cannot store a dtype.
    """
    import safetensors.torch

    apart: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if dense.numel() and storage in storages else dense
        storages.add(storage)
    # safetensors 0.4 cannot read a header with metadata only.
    header = {"format": "pt", **metadata} if apart else None
    safetensors.torch.save_file(apart, path, header)
    if durable:
        flush(path)
    return path.stat().st_size


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object to a file as JSON, and flush the file to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def write_index(folder: Path, files: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint folder's index file atomically: the name of each tensor's file, and
    metadata.
    """
    partial = folder / f".{INDEX}.partial"
    write_json(partial, {"metadata": dict(metadata), "weight_map": dict(sorted(files.items()))})
    os.replace(partial, folder / INDEX)


def flush(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk (`fsync`)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: Suffixes of weights in any format, which are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def copy_settings(source: Path, target: Path) -> None:
    """Copy config.json, the tokenizer and other files from a checkpoint's folder to the folder
    `target`. Subfolders, hidden files, weights, indexes of weights and SHA256SUMS are not copied.
    """
    for path in sorted(source.iterdir()):
        left_out = path.name.endswith((*_WEIGHTS, ".index.json", "SHA256SUMS"))
        if path.is_file() and not left_out and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
