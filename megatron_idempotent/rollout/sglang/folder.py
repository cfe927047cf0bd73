"""Updates as folders of safetensors beside each other, complete or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_idempotent.rollout.errors import EngineError
from megatron_idempotent.weights import Bucket, Staging, TensorInfo, WeightUpdate
from megatron_idempotent.weights.on_disk import INDEX


def read_vocabulary(checkpoint: Path) -> int:
    """Reads the vocabulary's size. Errors: `ValueError` where config.json does not say."""
    config = json.loads((checkpoint / "config.json").read_text())
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ValueError(f"{checkpoint / 'config.json'} names no vocab_size")
    return size


class UpdateFolder:
    """One update on its way to a folder, checked as it comes; nothing of it stays in memory.

    Example:
        folder = UpdateFolder(directory, update, expected=infos, checkpoint=checkpoint)
        for bucket in buckets:
            folder.add(bucket)
        path = folder.complete()
    """

    def __init__(
        self,
        directory: Path,
        update: WeightUpdate,
        *,
        expected: tuple[TensorInfo, ...],
        checkpoint: Path,
    ) -> None:
        self.update = update
        tag = hashlib.sha256(update.id.encode()).hexdigest()[:12]
        self.path = directory / f"v{update.version}-{tag}"
        # A dot: no glob of checkpoints finds what is not complete.
        self._partial = directory / f".{self.path.name}.partial"
        self._checks = Staging(update, expected=expected, keep=False)
        self._checkpoint = checkpoint
        self._files: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.discard()
        self._partial.mkdir(parents=True)

    def add(self, bucket: Bucket) -> None:
        """Check a bucket and write it. Errors: as `Staging.add`; `OSError`."""
        self._checks.add(bucket)
        if not bucket.tensors:
            return
        file = f"model-{bucket.index:05d}.safetensors"
        tensors = _apart(bucket.tensors)
        _safetensors().torch.save_file(tensors, self._partial / file, metadata={"format": "pt"})
        _flush(self._partial / file)
        self._sizes[file] = (self._partial / file).stat().st_size
        self._files.update(dict.fromkeys(bucket.tensors, file))

    def complete(self) -> Path:
        """Make the folder visible, whole, and return it. Errors: as `Staging.complete`."""
        self._checks.complete()
        for name in ("config.json", "generation_config.json"):
            if (self._checkpoint / name).is_file():
                shutil.copyfile(self._checkpoint / name, self._partial / name)
        index = {"metadata": {"file_sizes": self._sizes}, "weight_map": self._files}
        (self._partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        _flush(self._partial / INDEX)
        os.replace(self._partial, self.path)
        _flush(self.path.parent)
        return self.path

    def discard(self) -> None:
        """Remove it, complete or not. Twice: no-op."""
        shutil.rmtree(self._partial, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


def check_whole(path: Path, engine: str) -> None:
    """Refuse a folder that lost something since it was written.

    SGLang does not: it loads the tensors that it finds and leaves the others as they were.
    Errors: `EngineError`.
    """
    try:
        index: Mapping[str, Any] = json.loads((path / INDEX).read_text())
        sizes = {file: (path / file).stat().st_size for file in index["metadata"]["file_sizes"]}
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"engine {engine}: the staged folder {path} is not whole any more: {error}; stage the "
            "update again"
        ) from error
    if sizes != index["metadata"]["file_sizes"]:
        raise EngineError(
            f"engine {engine}: files in {path} have sizes {sizes}, they were written with "
            f"{index['metadata']['file_sizes']}; stage the update again"
        )


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors to the CPU, dense and apart: safetensors refuses those that share memory."""
    found: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        found[name] = dense.clone() if storage in taken else dense
        taken.add(storage)
    return found


def _flush(path: Path) -> None:
    """Flushes the file to the disk: another machine may read it, or this one go down."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "SglangEngine hands weights over as safetensors, which is not installed; "
            "pip install 'megatron-idempotent[http]'"
        ) from error
    return safetensors
