"""Applies patches during a block: `patched()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from . import install
from .api import apply, write_report
from .install import state
from .report import Report


@contextmanager
def patched(
    only: Iterable[str] | None = None, exclude: Iterable[str] = (), *, strict: bool | None = None
) -> Iterator[Report]:
    """Call `apply()` on entry; on exit remove the patches that this call has added, and no others.

    Example:
        with megatron_idempotent.patched(only=["train-interval-timer"]):
            train(...)
    """
    with install.lock:
        earlier_ids = set(state.wanted)
    result = apply(only, exclude, strict=strict)
    try:
        yield result
    finally:
        with install.lock:
            install.drop(set(state.wanted) - earlier_ids)
            write_report()
