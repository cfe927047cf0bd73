"""Refuses calls that no CPU can answer: each raises `NotEmulatedError` by its name.

It imports torch, so only `enable()` loads it. It refuses every public name of `torch.cuda` that is
not in the table, so that a call added by a later torch is refused, too.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch.cuda import graphs, memory, nvtx, profiler, random, streams

from .errors import NotEmulatedError
from .table import LEFT_ALONE, REFUSED_BY_NAME, emulated_names

#: `torch.cuda.f` is often defined in one of these and called from there as well.
SUBMODULES = (graphs, memory, nvtx, profiler, random, streams)


def refused_names() -> list[str]:
    """Return every name that is refused, e.g. "torch.cuda.CUDAGraph"."""
    emulated = emulated_names()
    public = [
        f"torch.cuda.{name}"
        for name in torch.cuda.__all__
        if f"torch.cuda.{name}" not in emulated
        and name not in LEFT_ALONE
        and callable(getattr(torch.cuda, name, None))
    ]
    return [*public, *(name for name in REFUSED_BY_NAME if _lookup(name) is not None)]


def replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = []
    for name in refused_names():
        original = _lookup(name)
        if inspect.isclass(original):
            # The class stays: modules subclass it and annotate with it while they are imported.
            attribute = "__new__" if "__new__" in vars(original) else "__init__"
            found.append((original, attribute, _refuse(name)))
            continue
        owner, attribute = _split(name)
        refusal = _refuse(name)
        found.append((owner, attribute, refusal))
        found += elsewhere(original, refusal, owner)
    return found


def elsewhere(original: Any, replacement: Any, owner: Any) -> list[tuple[Any, str, Any]]:
    """Return replacements for an object's other names in torch.cuda's modules."""
    return [
        (module, name, replacement)
        for module in (torch.cuda, *SUBMODULES)
        if module is not owner
        for name, value in vars(module).items()
        if value is original
    ]


def _refuse(name: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotEmulatedError(name)

    refuse.__name__ = name.rsplit(".", 1)[1]
    return refuse


def _split(name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")[1:]
    owner: Any = torch
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _lookup(name: str) -> Any:
    owner, attribute = _split(name)
    return getattr(owner, attribute, None)
