"""Installs and removes patches. The caller holds `lock`.

A patch is wanted if its version fits and every target's file exists. It has landed when every
target's module is imported, the bodies were judged, and every wrapper is installed.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

from . import decide, import_hooks
from .base import NOTHING, Conflict, PerProcess, PerProcessLock
from .catalog import index_entries, load
from .rows import INSIDE, LEFT, OUTSIDE, PAST, REVERTED, Row

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import IndexEntry, Place
    from .patch_points import PatchPoint, StaleReferences
    from .record import Patch, Target
    from .releases import Sources
    from .rows import Status


class State(PerProcess):
    """Holds what `apply()` remembers in this process: selection, patches, rows, patch points.
    A row is a patch's entry in the report. A patch point is the record of a replaced function.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(module, name)
        self.selection: decide.Selection | None = None
        """The selection of the latest `apply()`."""
        self.wanted: dict[str, IndexEntry] = {}
        self.named: frozenset[str] = frozenset()
        """Ids that the `only=` of any `apply()` named, for which a drifted body is accepted."""
        self.rows: dict[str, Row] = {}
        self.sites: dict[str, PatchPoint] = {}
        """The patch points, by the address of their function. They are not marked by an attribute
        of the function: one that is set through a wrapper is set on the original, and stays there.
        A patch point without wrappers is kept, so that the next `apply()` patches the same function
        object, which other code may refer to."""
        self.homes: dict[str, str] = {}
        """The addresses of functions that upstream has moved, by target address."""
        self.keeps_sources = False
        """True in processes whose forked children call `apply()`, and in these: what was read of
        upstream stays, so that no child reads it again, and none frees what it has inherited."""
        self.verify_within = 0.0
        """Seconds that `verify_at_start` waits for all ranks in the first schedule call; 0 if it is
        off, or done."""


state = State(__name__, "state")
lock = PerProcessLock(__name__, "lock", RLock)


def _before_fork() -> None:
    # A child forked during an installation would inherit a part of it. The wait has a limit: the
    # thread that installs may itself wait for an import lock that this one holds.
    global _held_over_fork
    _held_over_fork = lock.acquire(timeout=1)


def _after_fork_in_parent() -> None:
    if _held_over_fork:
        lock.release()


_held_over_fork = False
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)


def settle() -> None:
    """Install the patches that `apply()` calls have selected on those of their modules that are
    imported by now, and drop patches that are refused. `apply()` and finished imports call it.
    """
    due = [
        patch
        for patch in state.wanted.values()
        if any(import_hooks.is_complete(t.module) for t in patch.targets) and not landed(patch)
    ]
    if not due:
        return
    from .patch_points import StaleReferences
    from .releases import OnPath

    names, sources = StaleReferences(), OnPath()
    accepted: dict[str, str] = {}
    try:
        for patch in due:
            try:
                refusal = _land(patch, sources, names, accepted)
            except Exception as error:  # noqa: BLE001 - runs inside of users' import statements
                refusal = row(patch, "failed", f"{type(error).__name__}: {error}")
            if refusal is not None:
                drop({patch.id}, names)
                state.rows[patch.id] = refusal
    finally:
        names.rebind()  # also after an interrupted import: no later call would do it
    for patch_id, reason in accepted.items():
        if patch_id in state.wanted:
            state.rows[patch_id] = _accepted(state.wanted[patch_id], reason)


def forget_sources() -> list[str]:
    """Clear the caches of upstream's texts, syntax trees and code, which take megabytes, unless a
    module of a wanted patch is being imported, or `state.keeps_sources`.

    Returns:
        Modules and packages that are being imported now. If there are any, no cache is cleared,
        because the next import needs it.
    """
    names = {target.module for patch in state.wanted.values() for target in patch.targets}
    waiting = import_hooks.under_way(names)
    package = __name__.rpartition(".")[0]
    for name in () if waiting or state.keeps_sources else ("source", "surroundings"):
        module = sys.modules.get(f"{package}.{name}")
        for cached in () if module is None else vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
    return waiting


def _land(
    entry: IndexEntry, sources: Sources, names: StaleReferences, accepted: dict[str, str]
) -> Row | None:
    # Puts the reason into `accepted`, or returns the row of a refusal.
    by_name = entry.id in state.named
    verdict, prepared, refusal = judge(entry, named=by_name, sources=sources, lands=True)
    if refusal is not None:
        return refusal
    # All checks have passed; the rest consists of plain assignments.
    for target, site in prepared:
        if not site.in_place or not site.is_installed:
            state.sites[site.target.address] = site
            site.body = verdict.release or verdict.bodies[target.address].hash
            # Names in the target's own package are rebound too: it calls its function by them.
            package, selection = target.module.partition(".")[0], state.selection
            rebound = selection.settings.rebind if selection else ()
            site.install({"megatron", package, *rebound}, names)
        site.add(entry.id, target.wrapper)
    accepted[entry.id] = verdict.reason
    return None


def judge(
    entry: IndexEntry, *, named: bool, sources: Sources | None = None, lands: bool = False
) -> tuple[decide.Verdict, list[tuple[Target, PatchPoint]], Row | None]:
    """Decide whether a patch may be installed, by its modules' source and the live functions.
    Return the verdict, the patch points, and the report row if the patch is refused.

    Installation, a dry run and a report before the import call this, so that they agree.

    Args:
        entry: the patch, which is on and whose distribution is installed.
        named: True if the user has named the patch, and so accepts a drifted body.
        sources: reads modules, and keeps their texts for further patches.
        lands: True to prepare patch points; False changes nothing.

    Returns:
        The verdict, the prepared patch points, and the row of a patch that is refused.
    """
    verdict = decide.check_bodies(entry, named=named, sources=sources)
    if verdict.status is not None:
        return verdict, [], row(entry, verdict.status, verdict.reason)
    patch = load(entry.id)
    try:
        if not lands:
            check(patch, verdict)
            return verdict, [], None
        for target in patch.targets:  # a module loaded again may define what it once imported
            state.homes[target.address] = verdict.homes.get(target.address, target.address)
        return verdict, prepare(patch, verdict), None
    except Conflict as conflict:
        reason = f"{conflict}: undo that or exclude {patch.id}"
        return verdict, [], row(patch, "conflict", reason)
    except AttributeError as error:
        reason = f"{error}, although its source defines that"
        return verdict, [], row(patch, "failed", reason)


def _accepted(patch: IndexEntry, reason: str) -> Row:
    reasons = [reason]
    sites = [site for target in patch.targets if (site := site_of(target)) is not None]
    stale_names = [name for site in sites for name in site.bound_before]
    users = [name for target in load(patch.id).targets for name in target.early_users]
    stale_names += [name for name in users if import_hooks.is_complete(name)]
    if stale_names:
        reasons.append(f"{LEFT}: {', '.join(stale_names)}")
    inside = dict.fromkeys(packages for site in sites for packages in site.inside)
    if inside:
        reasons.append(f"wrapped by {', '.join(inside)} before us: {INSIDE}")
    waits = missing(patch)
    if waits:
        reasons.append(f"rest lands with {', '.join(waits)}")
    return row(patch, "pending_import" if waits else "applied", "; ".join(reasons))


def site_of(target: Place) -> PatchPoint | None:
    """Return the `PatchPoint`, the record of a replaced function in this process, for a target's
    function. It is found also if upstream has moved the function; None if that function was not
    replaced.
    """
    return state.sites.get(state.homes.get(target.address, target.address))


def check(patch: Patch, verdict: decide.Verdict) -> None:
    """Raise the error that `prepare` would raise for a patch, but make no patch point."""
    from .patch_points import check_patch_point

    for target in patch.targets:
        target_here, site = target.at(verdict.homes), site_of(target)
        if import_hooks.is_complete(target_here.module) and (site is None or not site.in_place):
            check_patch_point(target_here, verdict.bodies.get(target.address))


def prepare(patch: Patch, verdict: decide.Verdict) -> list[tuple[Target, PatchPoint]]:
    """Return (target, patch point) for each target whose module is imported.
    Missing patch points are made; nothing is installed.

    Raises:
        Conflict: another package's object has replaced a target's function.
        AttributeError: the module lacks the function, although its source defines it.
    """
    prepared = []
    opened: list[PatchPoint] = []
    from .patch_points import open_patch_point

    try:
        for target in patch.targets:
            target_here, site = target.at(verdict.homes), site_of(target)
            if not import_hooks.is_complete(target_here.module):
                continue
            if site is None or not site.in_place:
                fresh = open_patch_point(target_here, verdict.bodies.get(target.address))
                opened.append(fresh)
                if site is None or not site.same_place(fresh):
                    # Names bound before a reload still refer to the old patch point's function.
                    fresh.previous = site
                    site = fresh
            prepared.append((target, site))
    except (Conflict, AttributeError):
        prepared.clear()
        raise
    finally:
        prepared_ids = {id(site) for _, site in prepared}
        for site in opened:
            if id(site) not in prepared_ids:
                site.discard()
    return prepared


def drop(ids: set[str], names: StaleReferences | None = None) -> list[Row]:
    """Take the patches with these ids off the functions that they wrap, the last replaced function
    first, and stop waiting for their modules. Return the report rows of these patches.

    Args:
        names: collects the patch points whose names are to be rebound; None rebinds them at once.
    """
    from .patch_points import StaleReferences

    stale_names = StaleReferences() if names is None else names
    rows = {name: row(index_entries()[name], "disabled", REVERTED) for name in sorted(ids)}
    for address, site in reversed(list(state.sites.items())):
        ids_here = ids & set(site.layers)
        for patch_id in ids_here:
            site.remove(patch_id)
        if not site.layers and not site.uninstall(stale_names):
            packages = ", ".join(site.outside)
            reason = f"{packages} wrapped {address} after us: our layer stays below, doing nothing"
            rows |= {name: row(index_entries()[name], "conflict", reason) for name in ids_here}
    if names is None:
        stale_names.rebind()
    for patch_id in ids:
        state.wanted.pop(patch_id, None)
    state.named -= ids
    state.rows |= rows
    return [current(index_entries()[patch_id]) for patch_id in rows]


def landed(patch: IndexEntry) -> bool:
    """Return True if the patch is in place on all of its targets: each name leads to our function,
    and that function has the patch's wrapper.
    """
    return all(
        (site := site_of(target)) is not None and patch.id in site.layers and site.in_place
        for target in patch.targets
    )


def missing(patch: IndexEntry) -> list[str]:
    """Return, sorted, the names of the modules that have target functions of the patch but whose
    import has not ended, or not begun.
    """
    return sorted({t.module for t in patch.targets if not import_hooks.is_complete(t.module)})


def detours() -> dict[str, list[str]]:
    """Find code of this process that still runs upstream's function instead of the patched one: an
    override, or a reference to the function that something keeps. Return patched function's
    address → texts that name such code.
    """
    if not state.sites:
        return {}
    from .detours import detours

    return detours(state.sites.values())


def current(patch: IndexEntry, detours_of: Mapping[str, list[str]] = NOTHING) -> Row:
    """Return the patch's present report row; it is a `conflict` if a patched function was replaced
    since the patch was installed.

    Args:
        patch: the patch.
        detours_of: the result of `detours()`, whose clauses go into the reason.
    """
    landed_row = state.rows.get(patch.id)
    if landed_row is None:
        return row(patch, "disabled", "apply() was not called")
    sites = [site for target in patch.targets if (site := site_of(target)) is not None]
    if landed_row.status in ("applied", "already_applied"):
        lost = [site for site in sites if not site.in_place]
        if lost or not landed(patch):
            replacements = ", ".join(
                f"{site.target.address} by {site.replaced_by}" for site in lost
            )
            reason = f"its function was replaced after the patch landed: {replacements}"
            return row(patch, "conflict", reason)
        reasons = [landed_row.reason]
        outside = dict.fromkeys(package for site in sites for package in site.outside)
        if outside:
            reasons.append(f"wrapped by {', '.join(outside)}: {OUTSIDE}")
        past = [
            f"{target.qualname}: {clause}"
            for target in patch.targets
            for clause in detours_of.get(state.homes.get(target.address, target.address), ())
        ]
        if past:
            reasons.append(f"{PAST}: {', '.join(past)}")
        return row(patch, landed_row.status, "; ".join(reasons))
    if landed_row.reason == REVERTED:
        leftovers = [leftover for site in sites if (leftover := site.leftover) is not None]
        return row(patch, landed_row.status, "; ".join([REVERTED, *leftovers]))
    return landed_row


def row(patch: IndexEntry, status: Status, reason: str) -> Row:
    """Make the report row of `patch` from a status, a reason and the installed version of its
    distribution.
    """
    version = decide.version_of(patch)
    return Row(
        id=patch.id,
        status=status,
        reason=reason,
        version=None if version is None else version.text,
        targets=tuple(target.address for target in patch.targets),
    )
