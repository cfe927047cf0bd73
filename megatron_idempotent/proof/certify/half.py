"""Reads the float32 parameters that Megatron's optimizers keep of a model in half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .protocol import Wrong

LOSS_SCALE = 256.0
"""Multiplies losses in float16, whose least number is 2^-24 and whose largest is 65504.

Sums over the tokens of a microbatch stay below that, and few gradients of a token are so small."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Main:
    """Holds what a rank has of a main parameter: all of it, or with distopt a part."""

    start: int
    """The place of its first element among all of the parameter's."""
    values: Tensor


def mains_of(optimizer: Any) -> dict[Any, Main]:
    """Find the main parameters of this rank, by the parameter of the model."""
    found = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for model, main in _pairs(one):
            start = 0
            if hasattr(one, "shard_fp32_from_float16_groups"):
                start = one._get_model_param_range_map(model)["param"].start
            found[model] = Main(start=start, values=main.detach().cpu().flatten().clone())
    return found


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    for ours, theirs in (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("float16_groups", "fp32_from_float16_groups"),
    ):
        groups = zip(getattr(optimizer, ours, ()), getattr(optimizer, theirs, ()), strict=True)
        for models, mains in groups:
            yield from zip(models, mains, strict=True)


def joined(name: str, rounded: Tensor, parts: Sequence[Main]) -> Tensor:
    """Return the whole main parameter, in the shape of the model's own, which is it rounded.

    Raises:
        Wrong: a part is missing, two ranks have other bits, or the model has other values.
    """
    whole = torch.empty(rounded.numel(), dtype=torch.float32)
    there = torch.zeros(rounded.numel(), dtype=torch.bool)
    for part in parts:
        own = slice(part.start, part.start + len(part.values))
        known = there[own]
        if not torch.equal(whole[own][known], part.values[known]):
            raise Wrong(f"ranks have other bits in the main parameter of {name}")
        whole[own], there[own] = part.values, True
    if not there.all():
        raise Wrong(f"no rank has {int((~there).sum())} elements of the main parameter of {name}")
    whole = whole.view_as(rounded)
    if not torch.equal(whole.to(rounded.dtype), rounded):
        raise Wrong(f"{name} is not its main parameter, rounded")
    return whole


def rounded(mains: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a model of a type computes with, of whole main parameters."""
    return {name: value.to(dtype) for name, value in mains.items()}
