"""Implements `doctor`, which says what would be applied here, and why.

It imports neither torch nor Megatron, unless it is to look at others who patch Megatron, too.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence

from megatron_idempotent.lazy import untried_torch
from megatron_idempotent.patching import api, import_hooks, install
from megatron_idempotent.patching.api import apply
from megatron_idempotent.patching.catalog import (
    MEGATRON,
    OPEN,
    lost,
    patches,
    untried,
    without_case_file,
)
from megatron_idempotent.patching.decide import OFF_BY_DEFAULT, installed, supported
from megatron_idempotent.patching.report import COVERED, PROBLEMS, Report, Row
from megatron_idempotent.patching.source import locate
from megatron_idempotent.patching.table import render, terminal_width, wrapped
from megatron_idempotent.patching.trees import contents

from .doors import hook_here

#: Those who replace functions of Megatron → what does so, for `--beside`.
_NEIGHBOURS = {
    "liger_kernel": "liger_kernel.megatron:apply_liger_kernel_to_megatron",
    "mcore_bridge": "mcore_bridge",
    "mindspeed": "mindspeed.megatron_adaptor",
}
# The most problems that the first line names.
_NAMED = 4
# Status → (words of the first line after a number, heading of the group), in order.
_GROUPS = {
    "fixed_upstream": ("fixed upstream", "Fixed upstream: nothing to repair"),
    "missing_target": ("absent here", "Absent here: what is installed lacks the code"),
    "unsupported_version": ("for other releases", "For other releases"),
}


def doctor(*, as_json: bool, beside: str | None = None) -> int:
    """Print one line that sums up, and then the patches in groups, or all rows as JSON.

    Args:
        as_json: print JSON.
        beside: a module that patches Megatron when it is imported, or `module:function` to call.
            Patches are applied before that, and the rows say who stands at their functions.

    Returns:
        The exit code: 1 if a patch failed, drifted or is in conflict, so that a person has to look;
        else 0.

    Raises:
        ValueError: there is no such module or function, or importing it fails.
    """
    report = apply(dry_run=True) if beside is None else _applied_beside(beside)
    if as_json:
        print(json.dumps([row.as_dict() | {"files": _files(row)} for row in report], indent=2))
    else:
        print(overview(report, terminal_width()))
    return 1 if report.problems else 0


def _applied_beside(what: str) -> Report:
    module, _, function = what.partition(":")
    apply()
    try:
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--beside {what}: {type(error).__name__}: {error}") from error
    return api.report()


def overview(report: Report, width: int | None) -> str:
    """Return a report as text: one line that sums up, the problems, and then the rest by group.

    Args:
        report: the result of `apply(dry_run=True)`.
        width: the terminal's width in columns; None for a pipe, which gets one line per patch with
            its whole reason.
    """
    land = [row for row in report if row.status in COVERED]
    shared = [row for row in land if install.INSIDE in row.reason or install.OUTSIDE in row.reason]
    alone = [row for row in land if row not in shared]
    groups = [
        ("Problems: the hazard is here, and its patch is refused", report.problems),
        ("In place, with somebody else at the same function", shared),
        ("In place", [row for row in alone if row.status == "applied"]),
        (
            "Would land when their modules are imported",
            [row for row in alone if row.status != "applied"],
        ),
        ("Off", _with(report, "disabled")),
        *((heading, _with(report, status)) for status, (_, heading) in _GROUPS.items()),
    ]
    lines = [answer(report, land), *_commit()]
    if _with(report, "drifted"):
        lines.append("`megatron-idempotent drift --diff` shows what is new in a body that drifted.")
    lines += map(without_case_file, lost())
    lines += report.incomplete
    lines += filter(None, [untried_torch(), hook_here()])
    lines += [
        f"{name} is here, which patches Megatron, too: `doctor --beside {what}` says where"
        for name, what in _NEIGHBOURS.items()
        if import_hooks.find(name) is not None and name not in sys.modules
    ]
    parts = ["\n".join(line for text in lines for line in wrapped(text, width))]
    parts += [_group(heading, rows, width) for heading, rows in groups if rows]
    absent = Counter(patches()[row.id].distribution for row in _with(report, "not_installed"))
    if absent:
        names = (f"{name} ({n} patch{'es' if n > 1 else ''})" for name, n in absent.items())
        parts.append("\n".join(wrapped(f"Not installed: {', '.join(names)}", width)))
    return "\n\n".join(parts)


def answer(report: Report, land: Sequence[Row]) -> str:
    """Sum up a report in one line; `land` are the rows of patches that would be applied."""
    concerned = [*land, *report.problems]
    found = {patches()[row.id].distribution: row.version for row in concerned}
    if found:
        order = sorted(found, key=lambda name: (name != MEGATRON, name))
        on = ", ".join(f"{name} {found[name]}" for name in order)
        parts = [f"{len(land)} of {len(concerned)} would land on {on}"]
    else:
        parts = ["none would land"]
    counts: Counter[str] = Counter(row.status for row in report)
    for status in sorted(PROBLEMS):
        ids = [row.id for row in _with(report, status)]
        if ids:
            more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
            parts.append(f"{len(ids)} {status.upper()}: {', '.join(ids[:_NAMED])}{more}")
    default = sum(row.reason == OFF_BY_DEFAULT for row in report)
    absent = {patches()[row.id].distribution: row for row in _with(report, "not_installed")}
    if MEGATRON in absent:
        parts.append(f"{absent.pop(MEGATRON).reason} (asked with {sys.executable})")
    frameworks = len(absent)
    for count, words in (
        (default, "off by default"),
        (counts["disabled"] - default, "switched off"),
        *((counts[status], words) for status, (words, _) in _GROUPS.items()),
        (frameworks, f"framework{'s' if frameworks > 1 else ''} not installed"),
    ):
        if count:
            parts.append(f"{count} {words}")
    return "; ".join(parts)


def _commit() -> list[str]:
    """Return a line that says so if the installed Megatron is no release that was run."""
    version = installed(MEGATRON)
    if version is not None and supported(version, untried(), OPEN):
        return [f"Nobody has run {version.text}: its functions' contents decided about each patch"]
    found = contents(patches().values())
    if found is None or not found.others:
        return []
    which = f"{found.others} of the {found.functions} functions that patches wrap"
    return [
        f"Megatron says {found.version}, but {which} are not that release's: a development commit, "
        "or a patched one"
    ]


def _with(report: Report, status: str) -> list[Row]:
    return [row for row in report if row.status == status]


def _group(heading: str, rows: Sequence[Row], width: int | None) -> str:
    cells = [(f"  {row.id}", *_status(row), _reason(row, width)) for row in rows]
    return f"{heading} ({len(rows)})\n{render((), cells, width)}"


def _status(row: Row) -> tuple[str, ...]:
    return (row.status,) if row.status in PROBLEMS else ()


def _reason(row: Row, width: int | None) -> str:
    if row.status in PROBLEMS:
        return f"{patches()[row.id].summary}; {row.reason}"
    if width is None:
        return row.reason
    # The heading says when they land; a terminal has no room for the names of the modules.
    return row.reason.partition("; lands when ")[0].replace("; body reviewed on ", ", ")


def _files(row: Row) -> dict[str, str | None]:
    return {
        target: None if (path := locate(target.partition(":")[0])) is None else str(path)
        for target in row.targets
    }
