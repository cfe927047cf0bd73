"""Compares what an adapter exports with a model's parameters, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .parameters import ParameterPart


def compared(
    exported: Any, own: Sequence[ParameterPart], whole: Mapping[str, Tensor]
) -> tuple[set[str], str | None]:
    """Return the names of parameters that a rank has exported, and how they differ from the model.

    Tensors are a rank's own parameters in their order, or whole ones, or have names. Where names
    and shapes are other than Megatron's, the numbers of either model have to be among theirs.
    """
    found = list(_tensors(exported, ""))
    if not found:
        return set(), None
    mine = {part.name: part.value for part in own}
    shapes = [each.shape for _, each in found]
    for right in (mine, whole):
        if [each.shape for each in right.values()] == shapes:
            pairs = zip(found, right.items(), strict=True)
            wrong = [name for (_, has), (name, is_) in pairs if not _same(has, is_)]
            return set(right), _told(wrong)
    if all(name in whole for name, _ in found):
        wrong = []
        for name, has in found:
            rights = [each[name] for each in (mine, whole) if name in each]
            if not any(has.shape == each.shape and _same(has, each) for each in rights):
                wrong.append(name)
        return {name for name, _ in found}, _told(wrong)
    dtype = found[0][1].dtype
    numbers = _numbers([each for _, each in found], dtype)
    for right in (whole, mine):
        if bool(torch.isin(_numbers([*right.values()], dtype), numbers).all()):
            return set(right), None
    return set(mine), "the numbers of the model's parameters are not among them"


def _tensors(exported: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(exported, Tensor):
        if exported.is_floating_point():
            yield name, exported.detach().cpu()
    elif isinstance(exported, Mapping):
        for key, value in exported.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(exported, tuple) and len(exported) == 2 and isinstance(exported[0], str):
        yield from _tensors(exported[1], exported[0])
    elif isinstance(exported, (Sequence, Iterator)) and not isinstance(exported, (str, bytes)):
        for value in exported:
            yield from _tensors(value, name)


def _same(has: Tensor, right: Tensor) -> bool:
    """Return whether the values are the right ones, or these in the export's precision."""
    return torch.equal(has, right.detach().cpu().to(has.dtype))


def _numbers(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([each.detach().cpu().to(dtype).flatten() for each in values])


def _told(wrong: Sequence[str]) -> str | None:
    return f"{len(wrong)} tensors differ, the first is {wrong[0]}" if wrong else None
