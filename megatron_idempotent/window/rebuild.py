"""Replaces process groups by new ones, in every object that holds one.

What a poisoned session left under way belongs to its process groups. New groups of the
same ranks know nothing of it; parameters and optimizer state stay where they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_idempotent.megatron.process_groups import live_groups

from . import agreement
from .abort import abort_window, let_go
from .left_open import leave_coalescing
from .rebuild_holders import replace_everywhere


def rebuild_process_groups(
    model_chunks: list[Any] | None = None,
    optimizer: Any = None,
    *,
    groups: Iterable[Any] = (),
    timeout_s: float | None = None,
) -> int:
    """Replace Megatron's process groups by new ones of the same ranks, in every object; how many.

    It costs a few walks over every object of the process, seconds where there are millions, so it
    is for recovery alone. All ranks of the default group take part, each outside of any window,
    with the same arguments. They meet over the store of torch.distributed, so a collective that
    hangs is no obstacle; the default group itself is kept. Model, optimizer and config stay, and
    so does their state: whatever refers to an old group (attributes, containers, closures,
    partials) refers to the new one afterwards. Lifts the poison.

    Args:
        model_chunks: a window of theirs that was left is aborted first, see `abort_window`.
        optimizer: their optimizer.
        groups: process groups besides those in `megatron.core.parallel_state`, the same on each
            of their ranks.
        timeout_s: deadline of the new groups' collectives; None for torch's default.

    Raises:
        RuntimeError: something on some rank still holds an old group, such as a local variable of
            a running function; it is named. All else is done, and the session stays poisoned.

    Not covered: what holds a communicator under another name: captured CUDA graphs, user buffers
    of Transformer Engine, DeepEP and symmetric memory, DeviceMesh and Megatron-FSDP. Build these
    again, or restart the processes.
    """
    chunks = list(model_chunks or ())
    let_go(chunks)
    old = _unique([*live_groups(), *groups])
    agreement.forget()
    leave_coalescing()
    left = replace_everywhere(old, _anew(old, timeout_s))
    if chunks:
        abort_window(chunks, optimizer)
    # All ranks leave together, so that none waits for another that is still walking its objects.
    told = agreement.exchange(", ".join(dict.fromkeys(left)) or None, agreement.DEADLINE_S)
    if told:
        holders = "; ".join(f"{names} on rank {rank}" for rank, names in told.items())
        raise agreement.poison(
            f"the process groups are new, but old ones are still held by {holders}"
        )
    return len(old)


def _anew(old: list[Any], timeout_s: float | None) -> list[Any]:
    """Destroy `old` and make groups of the same ranks and backend; a collective."""
    layouts = [
        (tuple(dist.get_process_group_ranks(group)), dist.get_backend(group), group.group_desc)
        for group in old
    ]
    for group in old:
        dist.destroy_process_group(group)
    # Creating a group needs all ranks, in one order, members or not. Each rank knows its own
    # groups only; those that several ranks know are one, in the order of the lowest rank.
    known: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(known, layouts, group=agreement.control_group(agreement.DEADLINE_S))
    new: list[Any] = [None] * len(old)
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    for rank, rank_layouts in enumerate(known):
        for number, (ranks, backend, description) in enumerate(rank_layouts):
            if min(ranks) != rank:
                continue
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, group_desc=description
            )
            if dist.get_rank() in ranks:
                # The n-th group of these ranks that the lowest of them has is our n-th as well.
                same = [
                    layout for layout in rank_layouts[:number] if layout[:2] == (ranks, backend)
                ]
                own = [i for i, layout in enumerate(layouts) if layout[:2] == (ranks, backend)]
                new[own[len(same)]] = group
    assert None not in new, "ranks disagree about the groups that they share"
    return new


def _unique(groups: Iterable[Any]) -> list[Any]:
    return list({id(group): group for group in groups}.values())
