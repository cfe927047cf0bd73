"""Lists Megatron's process groups, and tells whether other objects refer to one."""

from __future__ import annotations

from typing import Any


def live_groups() -> list[Any]:
    """Return this rank's process groups in `megatron.core.parallel_state`, without WORLD."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    values: list[Any] = []
    for value in vars(parallel_state).values():
        if isinstance(value, dict):
            value = list(value.values())
        values += value if isinstance(value, list | tuple) else [value]
    groups = {id(item): item for item in values if isinstance(item, dist.ProcessGroup)}
    return [g for g in groups.values() if g in alive() and g is not dist.group.WORLD]


def alive() -> Any:
    """Return torch's internal table of existing process groups, keyed by group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map


def held(groups: list[Any]) -> list[bool]:
    """Return, for each process group, whether any object refers to it except for torch's tables and
    the list `groups`.
    """
    # The reference count of an object without other references depends on the interpreter.
    unheld = object()
    (free,) = _references([unheld])
    free -= 1  # its name
    return [
        count - free > _by_torch(group)
        for group, count in zip(groups, _references(groups), strict=True)
    ]


def _references(objects: list[Any]) -> list[int]:
    import sys

    return [sys.getrefcount(objects[index]) for index in range(len(objects))]


def _by_torch(group: Any) -> int:
    """Return the number of references to a process group in torch's own tables."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    by_group = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.pg_coalesce_state,
    )
    count = sum(key is group for table in by_group for key in table)
    return count + sum(item is group for tagged in world.tags_to_pg.values() for item in tagged)
