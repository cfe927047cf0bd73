"""Checks that patches on which library code depends are applied, or says what is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import decide
from .base import IndexEntry
from .catalog import index_entries, lost, without_case_file
from .install import current, landed

# Statuses of patches whose hazard this Megatron does not have.
_NOT_THERE = frozenset({"fixed_upstream", "missing_target", "unsupported_version"})


def always(_: Any) -> bool:
    """Return True for any model chunk. As the default of `Need.where` it makes a need apply to all
    chunks.
    """
    return True


class Need(NamedTuple):
    """Names a guarantee that library code needs from some patch, and what fails without it."""

    provided: str
    """A key of `patching.record.PROVIDED`."""
    without: str
    """The consequence if no applied patch provides it, as a clause."""
    where: Callable[[Any], bool] = always
    """Returns whether the need applies to a chunk."""
    a_door: bool = False
    """True if library code reaches Megatron through the patch, so needs it even if this Megatron
    does not have the hazard."""


def providers(name: str) -> list[IndexEntry]:
    """Return the index entry of each patch that provides the guarantee `name`, a key of `PROVIDED`,
    whether the patch is applied or not.
    """
    return [patch for patch in index_entries().values() if name in patch.provides]


def is_provided(name: str) -> bool:
    """Return True if a patch that provides the guarantee `name`, a key of `PROVIDED`, is in place
    in this process.
    """
    return any(map(landed, providers(name)))


def absent(name: str, *, a_door: bool) -> list[str]:
    """Return, for each patch that provides a key of `PROVIDED`, the reason why it is not in place.

    Args:
        name: a key that no patch in place provides.
        a_door: True to include patches whose hazard this Megatron does not have.

    Returns:
        Texts such as "no-sync-ends-early (disabled: named in exclude=)". If the case file of a
        patch in the index was deleted, the text names that file. Empty if none is missing.
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
    """Raise `RuntimeError` if a patch that `what`, a part of the library, needs for these model
    chunks is not applied.

    Raises:
        RuntimeError: a patch is not applied; the message has the reason, and the loss without it.
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
