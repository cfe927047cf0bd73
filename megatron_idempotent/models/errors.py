"""Errors of checkpoints and models, and their exchange, so that all ranks raise."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_idempotent.weights.errors import WeightsError
from megatron_idempotent.window.agreement import describe, exchange, refuse_if_poisoned

_LISTED = 20


class UnsupportedArchitecture(WeightsError):
    """A model that Megatron's GPTModel would not compute exactly; the message lists all of why."""


class CheckpointDamaged(WeightsError):
    """Files that are missing, cut short or unreadable; the message names them."""


class CheckpointMismatch(WeightsError):
    """Tensors that do not fit the model: names, shapes or types; the message lists them."""


class FailedElsewhere(WeightsError):
    """Another rank could not go on; the message says which, and why."""


def listed(texts: Sequence[str]) -> str:
    """Texts in one line, the first twenty of them."""
    more = len(texts) - _LISTED
    return "; ".join(texts[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


def agree_on(error: BaseException | None, what: str, *, deadline_s: float) -> None:
    """Raise on all ranks where any rank brings an error: its own, or `FailedElsewhere`.

    All ranks of the default group take part, where there is one.

    Args:
        error: what went wrong on this rank; None where nothing did.
        what: what has not been done, as in "nothing was loaded".
        deadline_s: how long to wait for the slowest rank, in seconds.
    """
    refuse_if_poisoned()
    failures = exchange(None if error is None else describe(error), deadline_s)
    if error is not None:
        raise error
    if failures:
        ranks_by_text: dict[str, list[str]] = {}
        for rank, text in sorted(failures.items()):
            ranks_by_text.setdefault(text, []).append(str(rank))
        told = "; ".join(f"rank {', '.join(ranks)}: {t}" for t, ranks in ranks_by_text.items())
        raise FailedElsewhere(f"{what}: {told}")
