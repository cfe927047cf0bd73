"""Ask for the patches that something stands on, and say what is lost without each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megatron_idempotent.engine.catalogue import outlines
from megatron_idempotent.engine.landing import current, landed

# Outcomes that say that this Megatron does not have the hazard.
_NOT_THERE = frozenset({"fixed_upstream", "missing_target", "unsupported_version"})


def always(_: Any) -> bool:
    """Say of each chunk that it has what is patched."""
    return True


class Need(NamedTuple):
    """A patch that something stands on."""

    patch_id: str
    without: str
    """The consequence of its absence, as a clause."""
    where: Callable[[Any], bool] = always
    """True of a chunk that has what is patched."""
    a_door: bool = False
    """True if Megatron is reached through the patch, whether or not the hazard is there."""


def check_applied(what: str, needs: Iterable[Need], chunks: Sequence[Any]) -> None:
    """Raise unless the patches are applied that `what` stands on for these chunks.

    Raises:
        RuntimeError: names each that is not, why it is not, and what is lost without it.
    """
    lost = []
    for need in needs:
        patch = outlines()[need.patch_id]
        if landed(patch) or not any(map(need.where, chunks)):
            continue
        row = current(patch)
        if need.a_door or row.status not in _NOT_THERE:
            lost.append(f"{patch.id} ({row.status}: {row.reason}), without which {need.without}")
    if lost:
        raise RuntimeError(
            f"{what} stands on patches that are not applied: {'; '.join(lost)}. Call "
            "megatron_idempotent.apply(), and exclude none of them"
        )
