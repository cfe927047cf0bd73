"""The tensors of a Hugging Face checkpoint in safetensors: one file, or several and an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors  # not `safe_open` itself, a class that cannot be pickled even by reference
import torch

from megatron_idempotent.weights.records import TensorInfo
from megatron_idempotent.weights.safetensors_io import DTYPES, INDEX

from .config import CheckpointDamaged, listed, read_json

SINGLE = "model.safetensors"


class Checkpoint:
    """Open files, of which slices are read; nothing is read before it is asked for.

    Example:
        with Checkpoint(directory) as checkpoint:
            rows = checkpoint.read("lm_head.weight", dim=0, start=0, size=100)
    """

    def __init__(self, directory: str | Path) -> None:
        """Errors: `CheckpointDamaged` listing files that are missing, cut short or unreadable."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. Twice: no-op."""
        self._files.clear()  # which unmaps them

    def read(self, name: str, *, dim: int, start: int, size: int) -> torch.Tensor:
        """A range of a tensor along a dimension; no more of the file is read.

        Errors: `CheckpointDamaged` naming the file.
        """
        path = self._file_by_name[name]
        chosen = (slice(None),) * dim + (slice(start, start + size),)
        try:
            rows: torch.Tensor = self._files[path].get_slice(name)[chosen]
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"{path}: {name} cannot be read ({error})") from error
        return rows

    def _wanted(self) -> dict[Path, list[str] | None]:
        """Files, and what the index says is in them; None without one."""
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            return {single: None}
        if not index.exists():
            raise CheckpointDamaged(
                f"{self.directory} has neither {SINGLE} nor {INDEX}: is this a checkpoint's folder?"
            )
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
        try:
            file = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            # safetensors compares the file's length with what its header says.
            bad.append(f"{path} is missing, incomplete or damaged ({error})")
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
            raise CheckpointDamaged(f"{path}: {name} is of type {found.get_dtype()}")
        dtype = DTYPES[found.get_dtype()]
        return TensorInfo(name=name, shape=tuple(found.get_shape()), dtype=dtype)
