"""Saves a model's weights as a checkpoint for `from_pretrained` and engines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_idempotent.rl.weights.records import (
    Bucket,
    TensorInfo,
    WeightSource,
    end_export,
    listed,
)
from megatron_idempotent.rl.weights.safetensors_io import (
    SINGLE,
    SafetensorsFile,
    copy_settings,
    read_json,
    write_index,
    write_json,
)
from megatron_idempotent.window.agreement import DEADLINE_S

from .buckets import split
from .config import Architecture, CheckpointMismatch, UnsupportedArchitecture, agree_on
from .names import hf_shapes


def save_hf(
    source: WeightSource,
    directory: str | Path,
    *,
    like: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    bucket_bytes: int = 1 << 30,
    replace: bool = False,
    config_changes: Mapping[str, Any] | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Write the weights of `source` as a Hugging Face checkpoint on rank 0, bucket by bucket. A
    collective: all ranks call this function.

    The checkpoint is written to a temporary folder in the same parent folder, and renamed to
    `directory` when it is complete, so that `directory` never has an incomplete checkpoint. All
    ranks return after the rename, or raise.

    Args:
        source: the weights, such as `MegatronWeights`.
        directory: the new checkpoint, on rank 0's host.
        like: a checkpoint whose configuration and tokenizer are copied; the configuration's dtype
            becomes that of `source`.
        max_shard_bytes: the most bytes of tensors in one file; a larger tensor gets its own file.
        bucket_bytes: the most bytes that are sent to rank 0 at a time; see `WeightSource`.
        replace: True to replace an existing directory.
        config_changes: further entries for config.json, such as
            {"quantization_config": source.quantization_config()}.
        deadline_s: how long ranks wait for rank 0 to finish its last file, in seconds.

    Raises:
        ValueError: the directory exists and `replace` is False.
        CheckpointMismatch: `like` has another model.
        OSError: writing failed on rank 0, such as on a full disk; the new checkpoint is removed.
        FailedElsewhere: another rank raised one of these.
    """
    infos = source.tensors()
    error: BaseException | None = None
    writer = None
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            writer = _Writer(Path(directory), Path(like), infos, max_shard_bytes, replace)
    except (ValueError, OSError) as bad:
        error = bad
    agree_on(error, "nothing was saved", deadline_s=deadline_s)
    stream = source.buckets(bucket_bytes=bucket_bytes)
    try:
        for bucket in stream:
            if writer is not None:
                writer.write(bucket)
            del bucket  # else its memory stays in use while the next one is made
        if writer is not None:
            writer.finish(config_changes or {})
    except (ValueError, OSError) as bad:
        error = bad
    finally:
        end_export(stream)
        if writer is not None:
            writer.clean_up()
    agree_on(error, "nothing was saved", deadline_s=deadline_s)


class _Writer:
    """Writes the new checkpoint's folder under a temporary name, and renames the folder when the
    checkpoint is complete.
    """

    def __init__(
        self,
        directory: Path,
        like: Path,
        infos: Sequence[TensorInfo],
        max_shard_bytes: int,
        replace: bool,
    ) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"save_hf() got max_shard_bytes={max_shard_bytes}; allowed: 1 or more")
        self._old = directory.with_name(f".{directory.name}.replaced")
        if self._old.exists() and not directory.exists():
            self._old.rename(directory)  # an earlier process died between its two renames
        if directory.exists() and not replace:
            raise ValueError(f"{directory} exists: pass replace=True to have it replaced")
        self._directory, self._like, self._infos = directory, like, infos
        _check_like(like, infos)
        shards = split([info.nbytes for info in infos], max_shard_bytes)
        is_single = len(shards) == 1
        self._shards = {
            SINGLE if is_single else f"model-{n:05}-of-{len(shards):05}.safetensors": [
                infos[member] for member in members
            ]
            for n, members in enumerate(shards, 1)
        }
        self._file_by_name = {
            info.name: file for file, members in self._shards.items() for info in members
        }
        self._files: dict[str, SafetensorsFile] = {}
        self._beside = directory.with_name(f".{directory.name}.writing")
        for leftover in (self._beside, self._old):
            shutil.rmtree(leftover, ignore_errors=True)
        self._beside.mkdir(parents=True)

    def write(self, bucket: Bucket) -> None:
        for name, tensor in bucket.tensors.items():
            if name not in self._file_by_name:
                raise ValueError(
                    f"{name} arrived, and tensors() did not announce it: have the source announce "
                    "all tensors that it yields"
                )
            file = self._file_by_name[name]
            if file not in self._files:
                path = self._beside / file
                self._files[file] = SafetensorsFile(path, self._shards[file])
            self._files[file].write(name, tensor)
            if self._files[file].complete:
                self._files[file].close()

    def finish(self, changes: Mapping[str, Any]) -> None:
        missing = [name for name, file in self._file_by_name.items() if file not in self._files]
        if missing:
            raise ValueError(
                f"{listed(missing)} are missing: have the source yield all tensors that it "
                "announces"
            )
        for file in self._files.values():
            file.close() if not file.complete else None
        if len(self._shards) > 1:
            total = sum(info.nbytes for info in self._infos)
            write_index(self._beside, self._file_by_name, {"total_size": total})
        self._copy_rest(changes)
        self._rename()

    def clean_up(self) -> None:
        """Close all files, and remove the temporary folder of an incomplete checkpoint."""
        for file in self._files.values():
            file.abandon()
        shutil.rmtree(self._beside, ignore_errors=True)

    def _copy_rest(self, changes: Mapping[str, Any]) -> None:
        copy_settings(self._like, self._beside)
        config = read_json(self._like / "config.json")
        dtype = str(self._infos[0].dtype).removeprefix("torch.")
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = dtype
        write_json(self._beside / "config.json", {**config, **changes})

    def _rename(self) -> None:
        if self._directory.exists():
            self._directory.rename(self._old)
        try:
            self._beside.rename(self._directory)
        except OSError:
            if self._old.exists():
                self._old.rename(self._directory)
            raise
        shutil.rmtree(self._old, ignore_errors=True)


def _check_like(like: Path, infos: Sequence[TensorInfo]) -> None:
    """Raise `CheckpointMismatch` unless the tensors `infos` have exactly the names and shapes that
    the config.json in the folder `like` implies. If that architecture is not supported, accept any
    tensors.
    """
    try:
        expected = hf_shapes(Architecture.read(like))
    except UnsupportedArchitecture:
        return
    shapes = {i.name: i.shape for i in infos if not i.name.endswith("_scale_inv")}
    wrong = [f"{name} is missing" for name in expected if name not in shapes]
    for name, shape in shapes.items():
        if expected.get(name) != shape:
            expected_shape = list(expected[name]) if name in expected else "nothing"
            wrong.append(f"{name} is {list(shape)}, {like} has {expected_shape}")
    if wrong:
        raise CheckpointMismatch(f"{like} is not of these weights' model: {listed(wrong)}")
