"""Describes what tasks wait for: the line at which each of them is."""

from __future__ import annotations

import asyncio
import linecache
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Tasks that stand at one line are one entry, and more entries than this are counted only.
_SHOWN = 20

_ASYNCIO = Path(asyncio.__file__).parent


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """One line per place at which tasks stand, the most tasks first.

    Example: `  3 tasks, such as Task-7, in Engine.generate (engine.py:80): await slot`.
    """
    named: dict[str, list[str]] = {}
    for task in sorted(tasks, key=lambda each: each.get_name()):
        named.setdefault(_stands_at(task), []).append(task.get_name())
    counted = Counter({place: len(names) for place, names in named.items()})
    lines = [
        f"  {named[place][0]} in {place}"
        if count == 1
        else f"  {count} tasks, such as {named[place][0]}, in {place}"
        for place, count in counted.most_common(_SHOWN)
    ]
    more = len(counted) - _SHOWN
    return "\n".join([*lines, *([f"  and at {more} more places"] if more > 0 else [])]) or "  none"


def _stands_at(task: asyncio.Task[Any]) -> str:
    """The innermost frame of the coroutines that a task runs, less asyncio's own."""
    inner: Any = task.get_coro()
    name, frame = getattr(inner, "__qualname__", repr(inner)), getattr(inner, "cr_frame", None)
    while (inner := getattr(inner, "cr_await", None)) is not None:
        found = getattr(inner, "cr_frame", None)
        if found is not None and Path(found.f_code.co_filename).parent != _ASYNCIO:
            name, frame = inner.__qualname__, found
    if frame is None:
        return str(name)
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{name} ({Path(file).name}:{line}): {linecache.getline(file, line).strip()}"
