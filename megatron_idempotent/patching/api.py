"""Implements `apply()`, `revert()` and `report()`, which users call."""

from __future__ import annotations

import os
import sys

from . import decide, import_hooks, install, releases, settings
from .base import MEGATRON, PatchError
from .catalog import index_entries
from .install import state
from .report import Report
from .rows import COVERED, FILES_DECIDE, LEFT, PROBLEMS, Row

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .base import IndexEntry


def apply(
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    *,
    strict: bool | None = None,
    dry_run: bool = False,
) -> Report:
    """Install the enabled patches that repair defects (hazards) of the Megatron on the import path.
    A patch whose module is not imported yet is installed when that module is imported.

    Safe to call any number of times and from any thread. Every process calls it for itself: forked
    children inherit the patches, spawned ones and Ray workers do not.

    Args:
        only: ids of the only patches to apply, even if a body that they wrap was not reviewed.
        exclude: ids to leave out.
        strict: raise if a patch failed, drifted or is in conflict; None reads
            `MEGATRON_IDEMPOTENT_STRICT`.
        dry_run: True to decide and report without a change.

    Returns:
        A row per known patch. A patch whose modules are not imported yet is `pending_import`.

    Raises:
        UnknownPatchError: `only`, `exclude` or the environment names no known patch.
        TypeError: an argument is of another type.
        ValueError: an environment variable has an invalid value, or, in strict mode, one that
            begins with `MEGATRON_IDEMPOTENT` is unknown.
        PatchError: a patch in `only` cannot be applied; or, in strict mode, any patch cannot, or a
            Megatron is installed and gets no patch. Nothing is changed then.

    Example:
        import megatron_idempotent
        print(megatron_idempotent.apply())
    """
    for name, value, choices in (
        ("strict", strict, (True, False, None)),
        ("dry_run", dry_run, (True, False)),
    ):
        if not any(value is choice for choice in choices):
            raise TypeError(f"{name}= is one of {choices}, got {value!r}")
    selection = _select(only, exclude, strict)
    with install.lock:
        import_hooks.forget()
        releases.forget()
        earlier_rows = dict(state.rows)
        rows = [_plan(patch, selection, full=dry_run) for patch in index_entries().values()]
        _raise_for(rows, selection)
        if dry_run:
            install.forget_sources()
            return Report(rows)
        earlier, settled, earlier_names = dict(state.wanted), state.selection, state.named
        added = {row.id for row in rows if row.status == "pending_import"} - set(earlier)
        state.selection = selection
        state.named |= selection.only or frozenset()
        state.rows = {row.id: row for row in rows}
        state.wanted |= {patch_id: index_entries()[patch_id] for patch_id in added}
        install.settle()
        try:
            _raise_for(state.rows.values(), selection)
        except PatchError:
            install.drop(added & set(state.wanted))
            lost = {name: state.rows[name] for name in set(earlier) - set(state.wanted)}
            state.selection, state.named, state.rows = settled, earlier_names, earlier_rows | lost
            raise
        install.forget_sources()
        changed = _changed(earlier_rows)
        write_report()
        waiting = {m for patch in state.wanted.values() for m in install.missing(patch)}
    # Without the lock: another thread may wait for it while that thread holds an import lock.
    _log(changed)
    import_hooks.when_complete(sorted(waiting), _on_import)
    with install.lock:
        return Report(state.rows.values())


def revert() -> Report:
    """Remove all installed patches of this process, and cancel those that wait for an import.

    Returns:
        A row per patch that was applied or waiting: `disabled`, or `conflict` if another package
        has wrapped our function in the meantime. Our function then only passes calls on.
    """
    with install.lock:
        import_hooks.forget()
        on = {patch_id for site in state.sites.values() for patch_id in site.layers}
        result = Report(install.drop(set(state.wanted) | on))
        write_report()
        return result


def report() -> Report:
    """Return a `Report`: the present status of each known patch in this process, and the reason.

    Before the first `apply()` each status is `disabled`. After `hook install` or `import
    megatron_idempotent.auto` the first import of Megatron calls `apply()`: until then the rows are
    those that this call will begin with.

    The reason of an applied patch names live code that bypasses it (`patching/detours.py`): a
    class that overrides the patched method and does not call it, a name that still refers to
    upstream's function.

    Raises:
        PatchError: in strict mode, a patch that landed late has a problem.
        UnknownPatchError, ValueError: the import of Megatron will call `apply()`, and an
            environment variable has an invalid value.
    """
    with install.lock:
        import_hooks.forget()
        if state.selection is None and import_hooks.door_waits():
            selection = _select(None, (), None)
            return Report(_plan(patch, selection, full=False) for patch in index_entries().values())
        detours = install.detours()
        rows = [install.current(patch, detours) for patch in index_entries().values()]
        if state.selection is not None and state.selection.strict:
            _raise_for(rows, state.selection)
        return Report(rows)


def _select(
    only: Iterable[str] | None, exclude: Iterable[str], strict: bool | None
) -> decide.Selection:
    all_entries = index_entries()
    environment = settings.read(all_entries)
    selection = decide.Selection(
        only=None if only is None else settings.check_ids(only, "only=", all_entries),
        exclude=settings.check_ids(exclude, "exclude=", all_entries),
        settings=environment,
        strict=environment.strict if strict is None else strict,
    )
    if environment.unknown:
        _complain(environment.unknown, strict=selection.strict)
    both = sorted((selection.only or frozenset()) & selection.exclude)
    if both:
        raise ValueError(f"only= and exclude= both name {', '.join(both)}: drop one of them")
    return selection


# Messages that were logged already, because apply() is called many times.
_said: set[str] = set()


def _complain(unknown: Iterable[str], *, strict: bool) -> None:
    if strict:
        raise ValueError("; ".join(unknown))
    import logging

    for sentence in unknown:
        if sentence not in _said:
            logging.getLogger("megatron_idempotent").warning("%s", sentence)
            _said.add(sentence)


def _plan(patch: IndexEntry, selection: decide.Selection, *, full: bool) -> Row:
    if install.landed(patch):
        return install.row(patch, "already_applied", state.rows[patch.id].reason)
    verdict = selection.gate(patch)
    if verdict.status is not None:
        if patch.id in state.wanted:
            return state.rows[patch.id]  # an earlier call asked for it, and it still waits
        return install.row(patch, verdict.status, verdict.reason)
    verdict = decide.check_installed(patch)
    if verdict.status is None:
        # Reading files takes tens of milliseconds, so it is left to the import of Megatron unless
        # the caller needs the decision now.
        by_name = selection.named(patch.id)
        if decided := full or by_name or selection.strict:
            verdict, _, refusal = install.judge(patch, named=by_name)
            if refusal is not None:
                return refusal
        else:
            verdict = decide.check_unread(patch)
    if verdict.status is not None:
        return install.row(patch, verdict.status, verdict.reason)
    waits = install.missing(patch)
    reason = f"lands when {', '.join(waits)} is imported" if waits else "ready to land"
    if not decided and (outside := decide.beside_range(patch)):
        reason = f"{outside}: {FILES_DECIDE} {', '.join(waits)} is imported"
    if verdict.reason:
        reason = f"{verdict.reason}; {reason}"
    return install.row(patch, "pending_import", reason)


def _on_import() -> None:
    with install.lock:
        import_hooks.forget()
        earlier_rows = dict(state.rows)
        install.settle()
        importing = install.forget_sources()
        changed = _changed(earlier_rows)
        if changed:
            write_report()
    _log(changed)
    import_hooks.when_complete(importing[:1], _forget_sources)  # the outermost


def _forget_sources() -> None:
    with install.lock:
        install.forget_sources()


def _changed(earlier_rows: dict[str, Row]) -> list[Row]:
    return [row for row in state.rows.values() if earlier_rows.get(row.id) != row]


def _log(changed: list[Row]) -> None:
    problems = [r for r in changed if r.status in PROBLEMS or LEFT in r.reason]
    applied = [row.id for row in changed if row.status == "applied"]
    nothing = nothing_lands(state.rows.values())
    # If logging is not imported, no program has asked for messages below warnings.
    if not problems and nothing is None and not (applied and "logging" in sys.modules):
        return
    import logging

    logger = logging.getLogger("megatron_idempotent")
    for row in problems:
        logger.warning("%s: %s on %s (%s)", row.id, row.status, row.version, row.reason)
    sentences = Report(state.rows.values()).incomplete if problems else ()
    for sentence in (*sentences, *filter(None, [nothing])):
        if sentence not in _said:
            logger.warning("%s", sentence)
            _said.add(sentence)
    if applied:
        in_place = sum(row.status in ("applied", "already_applied") for row in state.rows.values())
        logger.info("%d patches landed, so that %d are in place", len(applied), in_place)
        logger.debug("landed: %s", ", ".join(applied))


def write_report() -> None:
    """Write the report as JSON to the path in `MEGATRON_IDEMPOTENT_REPORT`, if that is set;
    `{rank}` in the path becomes the rank. If the file cannot be written, a warning is logged.
    """
    if state.selection is None or state.selection.settings.report_path is None:
        return
    path = state.selection.settings.report_path.replace("{rank}", os.environ.get("RANK") or "0")
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(Report(state.rows.values()).to_json())
        os.replace(temporary, path)
    except OSError as error:
        import logging

        if os.path.exists(temporary):
            os.unlink(temporary)
        # The patches are in place; a report that cannot be written is no reason to stop training.
        logging.getLogger("megatron_idempotent").warning(
            "cannot write %s_REPORT=%s: %s", settings.SWITCH, path, error
        )


def nothing_lands(rows: Iterable[Row]) -> str | None:
    """Return a sentence if Megatron is on the import path, but no enabled patch applies to it.
    A patch that is refused on this Megatron counts as applying. Otherwise return None.
    """
    on = (row for row in rows if row.status != "disabled")
    rows = [row for row in on if index_entries()[row.id].distribution == MEGATRON]
    if not rows or any(row.status in PROBLEMS | COVERED for row in rows):
        return None
    path = import_hooks.find("megatron.core.package_info") or import_hooks.find("megatron.core")
    if path is None:
        return None
    return f"not one patch is for the Megatron at {path} ({rows[0].reason}): it stays as it is"


def _raise_for(rows: Iterable[Row], selection: decide.Selection) -> None:
    bad = []
    rows = list(rows)
    nothing = nothing_lands(rows)
    if nothing is not None and selection.strict:
        raise PatchError(nothing)
    for row in rows:
        by_name = selection.named(row.id) and row.status not in COVERED
        if by_name and row.status == "disabled":
            continue  # the operator switched it off, which is no failure of the program
        if by_name or (selection.strict and row.status in PROBLEMS):
            bad.append(f"{row.id}: {row.status}: {row.reason}")
    if bad:
        remedy = "drop it from only=" if selection.only is not None else "exclude= it"
        raise PatchError("; ".join(bad) + f"; {remedy}, or see `megatron-idempotent doctor`")
