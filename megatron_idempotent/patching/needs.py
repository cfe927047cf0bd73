"""Checks that patches on which library code stands are applied, and says what is lost if not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import decide
from .base import Outline
from .catalog import lost, outlines, without_case_file
from .install import current, landed

# Outcomes that say that this Megatron does not have the hazard.
_NOT_THERE = frozenset({"fixed_upstream", "missing_target", "unsupported_version"})


def always(_: Any) -> bool:
    """Return True, because every chunk has what is patched."""
    return True


class Need(NamedTuple):
    """Names something that library code stands on and patches provide, and the loss without it."""

    provided: str
    """A key of `patching.record.PROVIDED`."""
    without: str
    """The consequence if no applied patch provides it, as a clause."""
    where: Callable[[Any], bool] = always
    """A function that returns whether a chunk has what is patched."""
    a_door: bool = False
    """True if library code reaches Megatron through the patch, so needs it without the hazard."""


def providers(name: str) -> list[Outline]:
    """Return the patches that provide a key of `PROVIDED`, applied or not."""
    return [patch for patch in outlines().values() if name in patch.provides]


def is_provided(name: str) -> bool:
    """Return whether a patch that provides this key of `PROVIDED` is in place."""
    return any(map(landed, providers(name)))


def absent(name: str, *, a_door: bool) -> list[str]:
    """Say of each patch that provides a key of `PROVIDED` why it is not in place.

    Args:
        name: a key that no patch in place provides.
        a_door: name patches whose hazard this Megatron does not have, too.

    Returns:
        Such as "no-sync-ends-early (disabled: named in exclude=)". Of a patch whose case file was
        deleted, while the index still lists it, that and the file's path. Empty where nobody lacks
        it.
    """
    absences = []
    for patch in providers(name):
        row = current(patch)
        if a_door or row.status not in _NOT_THERE:
            absences.append(f"{patch.id} ({row.status}: {row.reason})")
    for patch in lost().values():
        status = decide.check_installed(patch).status
        if name in patch.provides and (a_door or status not in _NOT_THERE):
            absences.append(f"{patch.id} (its case file {without_case_file(patch.id)})")
    return absences


def check_applied(what: str, needs: Iterable[Need], chunks: Sequence[Any]) -> None:
    """Raise unless the patches that `what` needs for these chunks are applied.

    Raises:
        RuntimeError: names each that is not, why it is not, and what is lost without it.
    """
    losses = []
    for need in needs:
        if is_provided(need.provided) or not any(map(need.where, chunks)):
            continue
        patches = absent(need.provided, a_door=need.a_door)
        if need.a_door and not patches:
            patches = [f"{need.provided}, which no patch provides"]
        if patches:
            losses.append(f"{' or '.join(patches)}, without which {need.without}")
    if losses:
        raise RuntimeError(
            f"{what} stands on patches that are not applied: {'; '.join(losses)}. Call "
            "megatron_idempotent.apply(), and exclude none of them"
        )
