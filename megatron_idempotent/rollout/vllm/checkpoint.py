"""The checkpoint that an engine was started from, as its own list of what an update brings."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_idempotent.weights import TensorInfo
from megatron_idempotent.weights.on_disk import tensor_infos, weight_files


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
