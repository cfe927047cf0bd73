"""Defines how a controller drives the ranks of one policy, each a process, and their errors."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Names the worker that every rank makes and then serves.

    `factory` is `package.module:callable`; each rank imports it once its default process group is
    up, and calls it with `argument`. What it returns is the worker: its methods are called by name.

    Example:
        factory = "megatron_idempotent.rl.trainer.async_ranks:PolicyWorker"
        spec = WorkerSpec(factory=factory, argument=job)
    """

    factory: str
    argument: Any = None


class RankGroup(Protocol):
    """Drives the ranks of a policy; `tests/rl/workers/contract_ranks.py` holds every kind to this.

    A call runs the method of one name on all ranks, in the main thread of each, and returns when
    all have answered; calls run in the order in which they were made. The event loop stays free.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

    async def start(self) -> None:
        """Start all ranks and make their workers; after a loss, fresh ranks in place of all.

        Errors: `RanksLost` if they cannot be started, `RankFailed` if a factory raises.
        """

    async def call(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method on all ranks; return the results by rank.

        Args:
            method: the name of the worker's method.
            args: arguments that are the same for all ranks.
            per_rank: one more argument for each rank, after those.
            timeout_s: seconds after which the ranks count as lost; None waits for as long as they
                live.

        Errors: `RankFailed` if the method raised on some rank, once all ranks have answered: the
            ranks live on. `RanksLost` if a rank died, its connection broke or the time was up: the
            other ranks are ended, and `start()` is needed.
        """

    async def close(self) -> None:
        """End all ranks. Twice: no-op."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankTraceback:
    """Describes the error that one rank raised. Example: `error.exception_type`."""

    rank: int
    exception_type: str
    """The qualified name of the error's class, such as `builtins.ValueError`."""
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankTraceback:
        """Put an exception into words, which can be read where its class is not known."""
        kind = type(error)
        try:
            message = str(error)
        except Exception as worse:  # noqa: BLE001 (one that cannot be printed is an error too)
            message = f"(its message cannot be made: {worse!r})"
        return cls(
            rank=rank,
            exception_type=f"{kind.__module__}.{kind.__qualname__}",
            message=message,
            traceback="".join(traceback.format_exception(kind, error, error.__traceback__)),
        )


class RankFailed(RuntimeError):
    """A method raised on some ranks, which live on; `errors` has the error of each."""

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
    """Ranks died or do not answer. All ranks were ended; `start()` makes new ones."""


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
