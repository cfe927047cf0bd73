"""Summarizes a report in one line, and lists its patches in groups, problems first."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from .base import MEGATRON
from .catalog import index_entries, patches
from .rows import FILES_DECIDE, INSIDE, OFF_BY_DEFAULT, OUTSIDE, PROBLEMS, Row
from .table import render, wrapped

# The most problems that the first line names.
_NAMED = 4
# Status → (words of the first line after a number, heading of the group), in order.
_GROUPS = {
    "fixed_upstream": ("fixed upstream", "Fixed upstream: nothing to repair"),
    "missing_target": ("absent here", "Absent here: what is installed lacks the code"),
    "unsupported_version": ("for other releases", "For other releases"),
}


def overview(
    report: Iterable[Row],
    incomplete: Iterable[str],
    width: int | None,
    *,
    dry_run: bool = False,
    notes: Iterable[str] = (),
) -> str:
    """Return a report of patches as text: a summary line, the problems, and other patches by group.

    Args:
        report: the rows of a report.
        incomplete: the report's sentences about groups of patches that are applied in part.
        width: the terminal's width in columns; None for a pipe, which gets one line per patch with
            its whole reason.
        dry_run: True if the report only says what `apply()` would do.
        notes: sentences that come after the first line.
    """
    report = list(report)
    problems = [row for row in report if row.status in PROBLEMS]
    in_place = [*_with(report, "applied"), *_with(report, "already_applied")]
    undecided = [row for row in _with(report, "pending_import") if FILES_DECIDE in row.reason]
    waiting = [row for row in _with(report, "pending_import") if row not in undecided]
    shared = [row for row in in_place if INSIDE in row.reason or OUTSIDE in row.reason]
    groups = [
        ("Problems: the hazard is here, and its patch is refused", problems),
        ("In place, with somebody else at the same function", shared),
        ("In place", [row for row in in_place if row not in shared]),
        (
            f"{'Would land when' if dry_run else 'Land as soon as'} their modules are imported",
            waiting,
        ),
        ("For other releases, if the files are those of this one", undecided),
        ("Off", _with(report, "disabled")),
        *((heading, _with(report, status)) for status, (_, heading) in _GROUPS.items()),
    ]
    land = "would land on" if dry_run else "wait for the import of"
    lines = [_answer(report, in_place, waiting, land, len(undecided)), *notes]
    if _with(report, "drifted"):
        lines.append("`megatron-idempotent drift --diff` shows what is new in a body that drifted.")
    lines += incomplete
    parts = ["\n".join(line for text in lines for line in wrapped(text, width))]
    parts += [_group(heading, rows, width) for heading, rows in groups if rows]
    absent = Counter(_distribution(row) for row in _with(report, "not_installed"))
    if absent:
        names = (f"{name} ({n} patch{'es' if n > 1 else ''})" for name, n in absent.items())
        parts.append("\n".join(wrapped(f"Not installed: {', '.join(names)}", width)))
    return "\n\n".join(parts)


def _answer(
    report: Sequence[Row],
    in_place: Sequence[Row],
    waiting: Sequence[Row],
    land: str,
    undecided: int,
) -> str:
    """Return one line about a report: how many patches have each status, and the problems' ids.

    Args:
        report: all rows.
        in_place: the rows of patches that are applied.
        waiting: the rows of patches that will be applied at an import.
        land: the verb for these.
        undecided: the number of patches for other releases that wait for the files to be read.
    """
    concerned = [*in_place, *waiting, *(row for row in report if row.status in PROBLEMS)]
    versions = {_distribution(row): row.version for row in concerned}
    order = sorted(versions, key=lambda name: (name != MEGATRON, name))
    on = ", ".join(f"{name} {versions[name]}" for name in order)
    if in_place:
        waiting_text = f", {len(waiting)} wait for their modules" if waiting else ""
        parts = [f"{len(in_place)} of {len(concerned)} in place on {on}{waiting_text}"]
    elif concerned:
        parts = [f"{len(waiting)} of {len(concerned)} {land} {on}"]
    else:
        parts = ["none would land" if land == "would land on" else "none in place"]
    counts: Counter[str] = Counter(row.status for row in report)
    for status in sorted(PROBLEMS):
        ids = [row.id for row in _with(report, status)]
        if ids:
            more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
            parts.append(f"{len(ids)} {status.upper()}: {', '.join(ids[:_NAMED])}{more}")
    default = sum(row.reason == OFF_BY_DEFAULT for row in report)
    absent = {_distribution(row): row for row in _with(report, "not_installed")}
    if MEGATRON in absent:
        parts.append(f"{absent.pop(MEGATRON).reason} (asked with {sys.executable})")
    frameworks = len(absent)
    for count, words in (
        (undecided, "for other releases if these are the files of this one"),
        (default, "off by default"),
        (counts["disabled"] - default, "switched off"),
        *((counts[status], words) for status, (words, _) in _GROUPS.items()),
        (frameworks, f"framework{'s' if frameworks > 1 else ''} not installed"),
    ):
        if count:
            parts.append(f"{count} {words}")
    return "; ".join(parts)


def _distribution(row: Row) -> str:
    return index_entries()[row.id].distribution


def _with(report: Iterable[Row], status: str) -> list[Row]:
    return [row for row in report if row.status == status]


def _group(heading: str, rows: Sequence[Row], width: int | None) -> str:
    cells = []
    for row in rows:
        status = (row.status,) if row.status in PROBLEMS else ()
        cells.append((f"  {row.id}", *status, _reason(row, width)))
    return f"{heading} ({len(rows)})\n{render((), cells, width)}"


def _reason(row: Row, width: int | None) -> str:
    if row.status in PROBLEMS:
        return f"{patches()[row.id].summary}; {row.reason}"
    if width is None:
        return row.reason
    # The heading says when they land; a terminal's lines have no room for the modules' names.
    reason = row.reason.partition("; lands when ")[0].replace("; body reviewed on ", ", ")
    return reason.removeprefix("lands when ").removesuffix(" is imported")
