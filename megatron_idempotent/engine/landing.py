"""Move patches from wanted to landed and off again. The caller holds `lock`.

Wanted: its version fits and every target's file exists. Landed: every target's module is imported,
the bodies were judged, and every wrapper is in.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from . import decide, late, versions
from .catalogue import patches
from .record import Patch, Target
from .report import COVERED, Row, Status
from .sites import Conflict, Site, install, open_site


@dataclass(slots=True)
class State:
    """Everything that `apply()` remembers in this process."""

    selection: decide.Selection | None = None
    """Of the latest `apply()`."""
    wanted: dict[str, Patch] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    """Asked for by name in any `apply()`, so that a drifted body is accepted."""
    rows: dict[str, Row] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    """The ledger, by target address. Never a flag on the target: a flag set through a wrapper
    lands on the original and outlives it."""


state = State()
lock = threading.RLock()


def _renew_lock() -> None:
    # Another thread of the parent may have held the lock while this child was forked off.
    global lock
    lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def settle() -> None:
    """Land whatever can land: called by `apply()` and by every import hook."""
    for patch in list(state.wanted.values()):
        if landed(patch) or all(not late.is_complete(target.module) for target in patch.targets):
            continue
        try:
            outcome = _land(patch)
        except Exception as error:  # noqa: BLE001 - runs inside of users' import statements
            outcome = row(patch, "failed", f"{type(error).__name__}: {error}")
        if outcome.status not in COVERED:
            drop({patch.id})
        state.rows[patch.id] = outcome


def _land(patch: Patch) -> Row:
    verdict = decide.check_bodies(patch, named=patch.id in state.named)
    if verdict.status is not None:
        return row(patch, verdict.status, verdict.reason)
    prepared: list[tuple[Target, Site]] = []
    for target in patch.targets:
        if late.is_complete(target.module):
            site = state.sites.get(target.address)
            if site is None or not site.in_place:
                decorators = len(verdict.bodies[target.address].tree.decorator_list)
                try:
                    site = open_site(target, decorators)
                except Conflict as conflict:
                    return row(patch, "conflict", f"{conflict}: undo that or exclude {patch.id}")
            prepared.append((target, site))
    reason = verdict.reason
    # Everything is validated; from here on only plain assignments happen.
    prefixes = {"megatron", *(state.selection.settings.rebind if state.selection else ())}
    for target, site in prepared:
        if site.installed is None:
            state.sites[target.address] = site
            left = install(site, prefixes)
            if left:
                reason += f"; bound before us and left alone: {', '.join(left)}"
        site.add(patch.id, target.wrapper)
    waits = missing(patch)
    if waits:
        return row(patch, "pending_import", f"{reason}; rest lands with {', '.join(waits)}")
    return row(patch, "applied", reason)


def drop(ids: set[str]) -> list[Row]:
    """Take these patches off, last in first out, and forget them."""
    rows = {patch_id: row(patches()[patch_id], "disabled", "reverted") for patch_id in sorted(ids)}
    for address, site in reversed(list(state.sites.items())):
        ours = ids & set(site.layers)
        for patch_id in ours:
            site.remove(patch_id)
        if site.layers:
            continue
        if site.uninstall():
            del state.sites[address]
        else:
            reason = f"someone wrapped {address} after us: our layer stays below, doing nothing"
            rows |= {patch_id: row(patches()[patch_id], "conflict", reason) for patch_id in ours}
    for patch_id in ids:
        state.wanted.pop(patch_id, None)
        state.named.discard(patch_id)
    state.rows |= rows
    return list(rows.values())


def landed(patch: Patch) -> bool:
    """Whether every target leads to our function and that function carries this patch."""
    return all(
        (site := state.sites.get(target.address)) is not None
        and patch.id in site.layers
        and site.in_place
        for target in patch.targets
    )


def missing(patch: Patch) -> list[str]:
    """Modules of the patch that are not imported yet."""
    return sorted({t.module for t in patch.targets if not late.is_complete(t.module)})


def current(patch: Patch) -> Row:
    """The patch's outcome as it stands now."""
    known = state.rows.get(patch.id)
    if known is None:
        return row(patch, "disabled", "apply() was not called")
    if known.status in ("applied", "already_applied") and not landed(patch):
        return row(patch, "conflict", "its function was replaced after the patch landed")
    return known


def row(patch: Patch, status: Status, reason: str) -> Row:
    """A row about `patch` with the version that is installed."""
    version = versions.installed(patch.distribution)
    return Row(
        id=patch.id,
        status=status,
        reason=reason,
        version=None if version is None else version.text,
        targets=tuple(target.address for target in patch.targets),
    )
