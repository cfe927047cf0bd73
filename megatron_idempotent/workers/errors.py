"""Errors of calls on ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankTraceback:
    """The error that one rank raised. Example: `error.exception_type`."""

    rank: int
    exception_type: str
    """Its qualified name, such as `builtins.ValueError`."""
    message: str
    traceback: str


class RankFailed(RuntimeError):
    """A method that raised on some ranks, which live on; `errors` has what each raised."""

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
    """Ranks that died or do not answer. All ranks were ended; `start()` makes new ones."""
