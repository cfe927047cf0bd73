"""Replaces process groups by new ones, in every object that refers to one.

The collectives that a poisoned session left in flight belong to its process groups. New groups of
the same ranks do not have them; parameters and optimizer state stay where they are.

Only a walk over all objects finds the references: Megatron, optimizers and callers keep groups
anywhere, and torch cannot give an old group a new backend: `_register_backend` keeps the first.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import gc
import inspect
import types
from collections.abc import Iterable
from itertools import compress, filterfalse
from typing import Any

import torch.distributed as dist

from megatron_idempotent.megatron.process_groups import held, live_groups
from megatron_idempotent.patching.patch_points import Identities
from megatron_idempotent.window import agreement

from .abort import abort_window, drop_collectives
from .open_contexts import leave_coalescing

_UNTRACKED = frozenset((dict, tuple))
"""Containers that the garbage collector does not list unless they refer to a tracked object."""
_BATCH = 256
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Substitutes:
    """Maps each old object to its new one, by identity; any other object maps to itself."""

    def __init__(self, old: list[Any], new: list[Any]) -> None:
        self.old = old  # kept, so that no other object gets one of their ids
        self._new = {id(a): b for a, b in zip(old, new, strict=True)}

    def __contains__(self, item: Any) -> bool:
        return id(item) in self._new

    def __getitem__(self, item: Any) -> Any:
        return self._new.get(id(item), item)


def replace_everywhere(old: list[Any], new: list[Any]) -> list[str]:
    """Replace `old[i]` by `new[i]` in every object that refers to it, except for these two lists.

    It walks all objects that the garbage collector tracks, a few times: seconds in a large process.
    It unfreezes frozen objects first, and freezes all objects afterwards.

    Returns:
        A description of each object that still refers to an old one, such as a running function.
    """
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    outdated, renewed = old, new
    while outdated:
        substitutes = _Substitutes(outdated, renewed)
        spared = {id(item) for item in (old, new, outdated, renewed)}
        tuples: list[Any] = []
        for holder in _holders(substitutes, spared):
            if isinstance(holder, tuple):
                tuples.append(holder)
            else:
                _replace_in(holder, substitutes)
        # A tuple cannot change: the next round gives the objects that refer to it a new tuple.
        outdated = [item for item in tuples if type(item) is tuple or hasattr(item, "_make")]
        renewed = [
            getattr(group, "_make", tuple)([substitutes[item] for item in group])
            for group in outdated
        ]
    del substitutes, tuples
    holders = [
        description
        for index, is_held in enumerate(held(old))
        if is_held
        for description in _in_words(old[index], {id(old), id(new)})
    ]
    if frozen:
        gc.freeze()
    return holders


def _holders(substitutes: _Substitutes, spared: set[int]) -> list[Any]:
    """Return all objects that refer to an old object.
    Left out are objects with an id in `spared`, and frames of this module's functions.
    """
    outdated_objects = Identities(substitutes.old)
    outdated = tuple(substitutes.old)  # from Python 3.13 on get_referrers() returns this tuple, too
    holders = gc.get_referrers(*outdated)
    queue = gc.get_objects()
    visited: set[int] = set()
    spared = {*spared, id(queue), id(holders), id(outdated)}
    # Objects that the collector does not list are reached through those that it lists. There are
    # millions of references, so each of the steps is one loop in C.
    while queue:
        fresh: dict[int, Any] = {}
        for start in range(0, len(queue), _BATCH):
            parts = gc.get_referents(*queue[start : start + _BATCH])
            containers = compress(parts, map(_UNTRACKED.__contains__, map(type, parts)))
            fresh.update((id(part), part) for part in filterfalse(gc.is_tracked, containers))
        queue = [part for key, part in fresh.items() if key not in visited]
        visited.update(fresh)
        holders += [part for part in queue if outdated_objects.among(gc.get_referents(part))]
    return [item for item in holders if id(item) not in spared and not _frame_here(item)]


def _replace_in(holder: Any, substitutes: _Substitutes) -> None:
    """Replace the references of `holder`, which is a container, a function or an object, to old
    objects by references to the new ones. If `holder` is the frame of an ended call, or a cache of
    results, clear it instead.
    """
    if isinstance(holder, types.FrameType):
        # A traceback keeps frames of ended calls. Clearing a generator's frame would end it.
        if not holder.f_code.co_flags & _SUSPENDS:
            with contextlib.suppress(RuntimeError):  # it is running
                holder.clear()
    elif isinstance(holder, dict):
        _in_dict(holder, substitutes)
    elif isinstance(holder, list | collections.deque):
        for index, item in enumerate(holder):
            holder[index] = substitutes[item]
    elif isinstance(holder, set):
        items = [substitutes[item] for item in holder]
        holder.clear()
        holder.update(items)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = substitutes[holder.cell_contents]
    elif isinstance(holder, functools.partial):
        args = substitutes[holder.args]
        args = tuple(substitutes[item] for item in args)
        state = (holder.func, args, holder.keywords, vars(holder))
        holder.__setstate__(state)  # type: ignore[attr-defined]
    elif isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()  # cached results are computed again
    elif isinstance(holder, types.FunctionType):
        holder.__defaults__ = substitutes[holder.__defaults__]
    else:
        _in_attributes(holder, substitutes)


def _in_dict(holder: dict[Any, Any], substitutes: _Substitutes) -> None:
    for key, value in list(holder.items()):
        if value in substitutes:
            holder[key] = substitutes[value]
        if key in substitutes:
            holder[substitutes[key]] = holder.pop(key)


def _in_attributes(holder: Any, substitutes: _Substitutes) -> None:
    # Since 3.11 an object refers to its attributes itself, until its `__dict__` is read.
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        _in_dict(attributes, substitutes)
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(holder, name, None)
            if value in substitutes:
                object.__setattr__(holder, name, substitutes[value])


def _frame_here(item: Any) -> bool:
    return isinstance(item, types.FrameType) and item.f_code.co_filename == __file__


def _in_words(old: Any, spared: set[int]) -> list[str]:
    words = []
    for holder in gc.get_referrers(old):
        if isinstance(holder, types.FrameType):
            if not _frame_here(holder):
                code = holder.f_code
                words.append(f"{code.co_name}() at {code.co_filename}:{holder.f_lineno}")
        elif id(holder) not in spared:
            words.append(f"a {type(holder).__module__}.{type(holder).__qualname__}")
    return words or ["a variable of a running function"]


def rebuild_process_groups(
    model_chunks: list[Any] | None = None,
    optimizer: Any = None,
    *,
    groups: Iterable[Any] = (),
    timeout_s: float | None = None,
) -> int:
    """Replace Megatron's process groups by new ones, in every object that refers to one.
    The new groups have the same ranks.

    It walks over every object of the process a few times, seconds for millions of objects, so it
    is for recovery alone. All ranks of the default group take part, each outside of any window,
    with the same arguments. They communicate over the store of torch.distributed, so a hanging
    collective does not block them; the default group itself is kept. Model, optimizer and config
    keep their state. Attributes, containers, closures and partials that referred to an old group
    refer to the new one afterwards. Then the session is no longer poisoned.

    It does not reach communicators in other objects: captured CUDA graphs, user buffers of
    Transformer Engine, DeepEP and symmetric memory, DeviceMesh and Megatron-FSDP. Build these
    again, or restart the processes.

    Args:
        model_chunks: this rank's chunks, whose gradients and unfinished window are dropped, see
            `abort_window`.
        optimizer: their optimizer.
        groups: process groups besides those in `megatron.core.parallel_state`, the same on each
            of their ranks.
        timeout_s: timeout of the new groups' collectives, in seconds; None for torch's default.

    Returns:
        The number of groups that were replaced.

    Raises:
        RuntimeError: an object on some rank still holds an old group, such as a local variable of
            a running function, which the message names. All other holders have the new groups,
            and the session stays poisoned.
    """
    chunks = list(model_chunks or ())
    drop_collectives(chunks)
    old = list({id(group): group for group in (*live_groups(), *groups)}.values())
    agreement.forget()
    leave_coalescing()
    remaining = replace_everywhere(old, _made_again(old, timeout_s))
    if chunks:
        abort_window(chunks, optimizer)
    # All ranks return together, so that none waits for a rank that is still walking its objects.
    names = agreement.exchange(", ".join(dict.fromkeys(remaining)) or None, agreement.DEADLINE_S)
    if names:
        holders = "; ".join(f"{text} on rank {rank}" for rank, text in names.items())
        raise agreement.poison(
            f"the process groups are new, but old ones are still held by {holders}: let go of them "
            "and call rebuild_process_groups() again, or start the processes again"
        )
    return len(old)


def _made_again(old: list[Any], timeout_s: float | None) -> list[Any]:
    """Destroy the process groups in `old`, and return new ones with the same ranks and backends.
    A collective.
    """
    layouts = [
        (tuple(dist.get_process_group_ranks(group)), dist.get_backend(group), group.group_desc)
        for group in old
    ]
    for group in old:
        dist.destroy_process_group(group)
    # Creating a group needs all ranks, members or not, in the same order. Each rank has its own
    # groups only; a group of several ranks is created once, in the order of its lowest rank.
    layouts_of_ranks: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    control_group = agreement.control_group(agreement.DEADLINE_S)
    dist.all_gather_object(layouts_of_ranks, layouts, group=control_group)
    new: list[Any] = [None] * len(old)
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    for rank, rank_layouts in enumerate(layouts_of_ranks):
        for number, (ranks, backend, description) in enumerate(rank_layouts):
            if min(ranks) != rank:
                continue
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, group_desc=description
            )
            if dist.get_rank() in ranks:
                # The lowest rank's n-th group of a set of ranks is our n-th group of that set, too.
                same = [
                    layout for layout in rank_layouts[:number] if layout[:2] == (ranks, backend)
                ]
                indices = [i for i, layout in enumerate(layouts) if layout[:2] == (ranks, backend)]
                new[indices[len(same)]] = group
    assert None not in new, "ranks disagree about the groups that they share"
    return new
