"""The plan of an export: which rank sends which part of every tensor, known to all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_idempotent.weights.records import TensorInfo

from .chunks import Placed
from .errors import CheckpointMismatch, FailedElsewhere, listed
from .layout import Share


class Part(NamedTuple):
    """A range of a tensor along `dim`, and the rank of the group that sends it."""

    dim: int
    start: int
    size: int
    rank: int


class Held(NamedTuple):
    """A share of this rank's, and the slot that it is in."""

    share: Share
    placed: Placed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All tensors in the order in which they go, and the parts of each."""

    infos: tuple[TensorInfo, ...]
    """The tensors, with the parameters' types."""
    parts: tuple[tuple[Part, ...], ...]
    """The parts of each tensor, in order along their dimension."""
    held: Mapping[tuple[str, int, int, int], Held]
    """The parts that this rank has, by their place."""


def make_plan(
    shapes: Mapping[str, tuple[int, ...]],
    placed: Sequence[Placed] | None,
    error: BaseException | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Tell all ranks of the group what this one has. A collective, where there is a group.

    Args:
        shapes: of all tensors, in order.
        placed: this rank's slots; None where they could not be found.
        error: why they could not; all ranks raise then.
        group: the default group where None.

    Raises:
        FailedElsewhere: another rank brings an error.
        CheckpointMismatch: parts of tensors that no rank has, or types that differ.
    """
    held: dict[tuple[str, int, int, int], Held] = {}
    for each in placed or ():
        for share in each.slot.shares():
            held.setdefault(share.place, Held(share, each))
    mine = {place: each.placed.parameter.dtype for place, each in held.items()}
    told = _everybody(mine, None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]
    if failed:
        raise FailedElsewhere(f"there is nothing to export: {listed(failed)}")
    owners: dict[str, dict[tuple[int, int, int], tuple[int, torch.dtype]]] = {}
    wrong: list[str] = []
    for rank, (places, _) in enumerate(told):
        for (name, *place), dtype in places.items():
            dim, start, size = place
            _, there = owners.setdefault(name, {}).setdefault((dim, start, size), (rank, dtype))
            if there != dtype:
                wrong.append(f"{name} is {there} and {dtype} on rank {rank}")
    infos, parts = [], []
    for name, shape in shapes.items():
        found = owners.get(name, {})
        ordered = tuple(Part(*place, rank) for place, (rank, _) in sorted(found.items()))
        if not _covers(ordered, shape):
            spans = [f"{start} to {start + size}" for _, start, size, _ in ordered]
            wrong.append(f"of {name} {list(shape)} there is {', '.join(spans) or 'nothing'}")
            continue
        dtypes = {dtype for _, dtype in found.values()}
        if len(dtypes) > 1:
            wrong.append(f"{name} is of several types, {sorted(map(str, dtypes))}")
        infos.append(TensorInfo(name=name, shape=shape, dtype=dtypes.pop()))
        parts.append(ordered)
    if wrong:
        raise CheckpointMismatch(
            f"the ranks' chunks do not make up the model: {listed(wrong)}; pass all chunks of "
            "every rank"
        )
    return Plan(infos=tuple(infos), parts=tuple(parts), held=held)


_Told = tuple[dict[tuple[str, int, int, int], torch.dtype], str | None]


def _everybody(
    mine: dict[tuple[str, int, int, int], torch.dtype],
    text: str | None,
    group: dist.ProcessGroup | None,
) -> list[_Told]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [(mine, text)]
    told: list[_Told] = [({}, None)] * dist.get_world_size(group)
    dist.all_gather_object(told, (mine, text), group=group)
    return told


def _covers(parts: Sequence[Part], shape: Sequence[int]) -> bool:
    """Returns whether parts follow each other along one dimension, from its start to its end."""
    at = 0
    for part in parts:
        if part.dim != parts[0].dim or part.start != at:
            return False
        at += part.size
    return bool(parts) and at == shape[parts[0].dim]
