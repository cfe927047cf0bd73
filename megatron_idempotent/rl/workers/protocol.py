"""Defines how a controller drives the ranks of one policy, each a process, and their errors."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Holds the import path of the factory that makes a worker on every rank, and the argument with
    which the factory is called.

    `factory` is `package.module:callable`; each rank imports it after creating its default process
    group, and calls it with `argument`. The result is the worker, whose methods are called by name.

    Example:
        factory = "megatron_idempotent.rl.trainer.async_ranks:PolicyWorker"
        spec = WorkerSpec(factory=factory, argument=job)
    """

    factory: str
    argument: Any = None


class RankGroup(Protocol):
    """The protocol of a controller's access to the ranks of a policy: starts them, calls methods on
    all of them, and ends them.

    A call runs a method on all ranks, in the main thread of each, and returns when all have
    finished. Calls run in the order in which they were made, and do not block the event loop.
    `tests/rl/workers/contract_ranks.py` tests implementations.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

    async def start(self) -> None:
        """Start all ranks and construct their workers; ranks of an earlier start are ended first.

        Raises:
            RanksLost: the ranks cannot be started.
            RankFailed: a factory raised.
        """

    async def call(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of the worker on every rank; return the results in the order of ranks.

        Args:
            method: the name of the worker's method.
            args: arguments for all ranks.
            per_rank: one further argument for each rank, after `args`.
            timeout_s: seconds after which the ranks count as lost; None for no limit.

        Raises:
            RankFailed: the method raised on some rank; raised once all ranks have finished. The
                ranks stay alive.
            RanksLost: a rank died, its connection broke or the time ran out. All other ranks are
                ended, and `start()` is needed.
        """

    async def close(self) -> None:
        """End all ranks. A second call is a no-op."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankTraceback:
    """An error that was raised on one rank, as text. Example: `error.exception_type`."""

    rank: int
    exception_type: str
    """The qualified name of the error's class, such as `builtins.ValueError`."""
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankTraceback:
        """Make a `RankTraceback` from an exception that was raised on a rank. It has only text, so
        a process that does not have the exception's class can read it too.
        """
        kind = type(error)
        try:
            message = str(error)
        except Exception as worse:  # noqa: BLE001 (`__str__` of the error may raise)
            message = f"(its message cannot be made: {worse!r})"
        return cls(
            rank=rank,
            exception_type=f"{kind.__module__}.{kind.__qualname__}",
            message=message,
            traceback="".join(traceback.format_exception(kind, error, error.__traceback__)),
        )


class RankFailed(RuntimeError):
    """A worker's method raised on some ranks. All ranks stay alive; `errors` has the error of each
    failing rank.
    """

    def __init__(self, method: str, errors: Sequence[RankTraceback]) -> None:
        first = errors[0]
        more = f" (and on {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
        super().__init__(
            f"{method}() raised {first.exception_type} on rank {first.rank}{more}: "
            f"{first.message}\n{first.traceback}"
        )
        self.method = method
        self.errors = tuple(errors)


class RanksLost(RuntimeError):
    """Ranks died or do not respond. All ranks were ended; `start()` starts new ones."""


def is_alive(pid: int) -> bool:
    """Return True if this machine has a process with the id `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
