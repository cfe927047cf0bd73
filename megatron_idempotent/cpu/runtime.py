"""Turning the emulation on and off. Imports torch only inside `enable()`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from megatron_idempotent.engine.per_process import PerProcess, PerProcessLock
from megatron_idempotent.missing import naming_the_remedy

_MISSING = object()


class _Ledger:
    """Keeps what was replaced, to put it back by identity, last in first out."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        # The raw entry: getattr would turn static methods and inherited ones into something else.
        self._entries.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def names(self) -> set[str]:
        return {
            f"{getattr(owner, '__module__', None) or ''}.{owner.__qualname__}.{name}"
            if isinstance(owner, type)
            else f"{owner.__name__}.{name}"
            for owner, name, _ in self._entries
        }

    def undo(self) -> None:
        while self._entries:
            owner, name, before = self._entries.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class _Active:
    """One activation: its ledger and the import finder for modules yet to come."""

    def __init__(self) -> None:
        self.ledger = _Ledger()
        self.finder: Any = None

    def start(self) -> None:

        from megatron_idempotent.cpu import (
            collectives,
            compiling,
            cuda_calls,
            late,
            placement,
            refusals,
        )

        # All are computed before any is installed: they look up originals.
        planned = [
            *cuda_calls.replacements(),
            *refusals.replacements(),
            *placement.replacements(),
            *collectives.replacements(),
            *compiling.replacements(),
        ]
        for owner, name, value in planned:
            self.ledger.replace(owner, name, value)
        self.finder = late.Completer(self.ledger.replace)
        sys.meta_path.insert(0, self.finder)
        for module_name, complete in late.COMPLETE.items():
            if (module := sys.modules.get(module_name)) is not None:
                complete(module, self.ledger.replace)

    def stop(self) -> None:
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.ledger.undo()


class _Runtime(PerProcess):
    active: _Active | None = None
    depth = 0


_runtime = _Runtime(__name__, "_runtime")
_lock = PerProcessLock(__name__, "_lock", threading.RLock)


def enable() -> None:
    """Answer Megatron's calls into `torch.cuda` on the CPU until the matching `disable()`.

    Imports torch. Calls nest: the runtime stays on until `disable()` has been called as often.
    For the whole process, not for one thread.

    Raises:
        RuntimeError: a CUDA device is in reach, so that emulating one would hide it.
    """
    with _lock:
        if _runtime.active is None:
            _refuse_real_cuda()
            activation = _Active()
            with contextlib.ExitStack() as undo_if_it_fails:
                undo_if_it_fails.callback(activation.stop)
                activation.start()
                undo_if_it_fails.pop_all()
            _runtime.active = activation
        _runtime.depth += 1


def disable() -> None:
    """Undo one `enable()`; with the last one every replaced name is back, by identity.

    A call without a matching `enable()` does nothing.
    """
    with _lock:
        if _runtime.active is None:
            return
        _runtime.depth -= 1
        if _runtime.depth == 0:
            activation, _runtime.active = _runtime.active, None
            activation.stop()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`with cpu.enabled():` turns the runtime on inside the block."""
    enable()
    try:
        yield
    finally:
        disable()


def is_enabled() -> bool:
    """True between `enable()` and its matching `disable()`."""
    return _runtime.active is not None


def replaced_names() -> set[str]:
    """The names that are replaced now, e.g. "torch.cuda.synchronize"; empty when off."""
    return set() if _runtime.active is None else _runtime.active.ledger.names()


def _refuse_real_cuda() -> None:
    with naming_the_remedy("megatron_idempotent.cpu.enable()"):
        import torch

    if torch.cuda.is_available():
        raise real_cuda(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def real_cuda(device_count: int, visible: str | None) -> RuntimeError:
    """Makes the error of `enable()` where CUDA is in reach."""
    setting = "is not set" if visible is None else f"is {visible!r}"
    return RuntimeError(
        f"megatron_idempotent.cpu emulates CUDA where there is none, but this process can use "
        f"{device_count} CUDA device(s) (CUDA_VISIBLE_DEVICES {setting}); start it with "
        f'CUDA_VISIBLE_DEVICES="" to use the CPU runtime'
    )
