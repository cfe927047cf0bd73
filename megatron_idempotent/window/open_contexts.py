"""Ends contexts that an exception has left open.

Otherwise they would end later: a suspended generator runs its `finally` when the traceback that
refers to it is freed, which may be during a later window.

Only a walk over all objects finds a generator that upstream enters without `with`: once the
exception is handled, no running frame refers to it, and a kept traceback keeps it suspended.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.megatron.process_groups import live_groups


def close_contexts(error: BaseException | None) -> None:
    """End generator contexts whose exit was interrupted by `error` or its causes, innermost first.

    An example is `fork()` of Megatron's random states, which would restore old states later. Only
    frames of `contextlib` are examined; the caller's frames stay as they are for a debugger.
    """
    for raised in reversed(list(_chain(error))):
        frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)]
        for frame in reversed(frames):
            if frame.f_code.co_filename == contextlib.__file__:
                context = frame.f_locals.get("self")
                if isinstance(context, contextlib._GeneratorContextManager):
                    # Its `finally` may raise because an inner context ended late; a context
                    # around this call is executing, so that it cannot be closed.
                    with contextlib.suppress(Exception):
                        _end(context.gen)


def leave_no_sync(chunks: list[Any]) -> None:
    """Close upstream's `no_sync` generators of these chunks that a traceback keeps suspended.

    The schedules enter it without `with`, so no frame of `contextlib` refers to it. If they ended
    later, they would turn synchronisation on.
    """
    for generator in _suspended("no_sync"):
        owner = generator.gi_frame.f_locals.get("self")
        if any(owner is chunk or owner is getattr(chunk, "module", chunk) for chunk in chunks):
            _end(generator)


def leave_coalescing() -> None:
    """Close the generators of torch's `_coalescing_manager` that a traceback keeps suspended."""
    for generator in _suspended("_coalescing_manager"):
        _end(generator)


def drop_coalescing(chunks: list[Any]) -> None:
    """Drop collectives that torch was coalescing into one launch, in WORLD and Megatron's groups.

    torch goes on collecting as long as its table has the group: every later `all_reduce` would only
    be queued, and would return without reducing anything.
    """
    _drop([dist.group.WORLD, *live_groups()])
    for chunk in chunks:
        drop_coalescing_of(*bucket_groups(chunk))


def drop_coalescing_of(*holders: Any) -> None:
    """Drop collectives that torch was coalescing in the process groups of these bucket groups."""
    _drop([value for holder in holders for value in vars(holder).values()])


def _drop(groups: list[Any]) -> None:
    state = distributed_c10d._world.pg_coalesce_state
    group_ids = set(map(id, groups)) if state else set()
    for group in [group for group in state if id(group) in group_ids]:
        del state[group]


def _end(generator: Any) -> None:
    # CPython 3.12's close() keeps the arguments of a generator that has not started.
    with contextlib.suppress(GeneratorExit):
        generator.throw(GeneratorExit)


def _suspended(name: str) -> list[Any]:
    return [
        item
        for item in gc.get_objects()
        if type(item) is types.GeneratorType and item.__name__ == name and item.gi_frame is not None
    ]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and all exceptions that led to it: `__cause__`s and `__context__`s."""
    visited: set[int] = set()
    queue = [error]
    while queue:
        raised = queue.pop()
        if raised is not None and id(raised) not in visited:
            visited.add(id(raised))
            yield raised
            queue += [raised.__cause__, raised.__context__]
