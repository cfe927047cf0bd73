"""Writes docs/layouts.md: how near each layout's step came to its definition, on each Megatron.

`python -m benchmarks._layouts FOLDER` merges the files in that folder into
docs/layouts.json and writes the page and its grid again. `nox -s layouts` leaves there, for each
Megatron and adapter, what `certify --grid --json` said, as `MEGATRON/ADAPTER.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_idempotent.patching.releases import place
from megatron_idempotent.proof.certify import CHECKS
from megatron_idempotent.proof.certify import layout as named
from megatron_idempotent.proof.certify.run import alike as without_replicas

from . import _grid

FOUND = Path("docs", "layouts.json")
PAGE = Path("docs", "layouts.md")
ADAPTERS = {
    "Megatron": "Megatron alone: one call of its schedule",
    "Window": "`accumulation_window`: a call of the schedule for each part",
    "SplitStep": "`TrainStep`: a call of `microbatch` for each part",
    "OrderStable": "`TrainStep(order_stable=True)`: the same bits on any number of replicas",
    "FSDPSplitStep": "`FSDPTrainStep` on FSDP2, which is torch's: Megatron has no part in it",
}
"""The adapters of `certify.adapters`, and what each table of the page is about."""

Verdicts = Mapping[str, Mapping[str, Sequence[Any]]]
"""Maps a layout and a check to verdict, part of the bound, and fault."""
Found = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Maps a Megatron and an adapter to the `date` of the run and its `layouts`, which are verdicts."""

STEPS = ("whole-step", "split-step")
_HEAD = """\
# Layouts

How near each layout's step comes to [its definition](certify.md#how-close-is-right), on each
Megatron: a release, or a commit that frameworks pin. A cell of the table has the layouts in which
the steps in one call and in three passed, of those in which they were made, and the largest error
of any of them as a part of the bound that was derived for it, so that 1 would be at the bound. The
layouts are those of `certify --grid`, in which each two [words](certify.md#layouts) meet.

"""
_TAIL = """
[The grid](assets/grids/layouts.json) has each layout by itself, and how many layouts passed each of
`TrainStep`'s checks; the site draws it below this paragraph. Not judged there is what
[certify does not judge](certify.md#not-judged). Frameworks' own steps: [findings](findings.md).

`nox -s layouts -- 0.19.2 nemo-rl` runs these two Megatrons again, `python -m benchmarks._layouts`
writes this page from [layouts.json](layouts.json), and this runs a single layout:

    megatron-idempotent certify --layout dp2-pp2 \\
      megatron_idempotent.proof.certify.adapters:SplitStep
"""


def read(folder: Path, known: Collection[str] = ADAPTERS) -> Found:
    """Read the results of `certify --json` in `folder/MEGATRON/ADAPTER.json`; return them by
    Megatron and adapter. Raise `ValueError` for an adapter that is not in `known`.

    Raises:
        ValueError: there is none, one is no list of results, or of an unknown adapter.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        if path.stem not in known:
            raise ValueError(f"{path} is of no adapter: name it after one of {', '.join(known)}")
        day = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).date().isoformat()
        layouts: dict[str, dict[str, Sequence[Any]]] = {}
        found.setdefault(path.parent.name, {})[path.stem] = {"date": day, "layouts": layouts}
        try:
            for row in json.loads(path.read_text(encoding="utf-8")):
                said = row["verdict"], float(f"{row['of_bound']:.2g}"), row["fault"]
                layouts.setdefault(row["layout"], {})[row["check"]] = said
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not what `certify --json` prints: {error}") from error
    if not found:
        raise ValueError(f"{folder} has no MEGATRON/ADAPTER.json: `nox -s layouts` writes them")
    return found


def page(found: Found) -> str:
    """Return the text of docs/layouts.md: a table line for each adapter, and the faults."""
    lines = [line("", *found), line(*["---"] * (len(found) + 1))]
    told = []
    for adapter, title in ADAPTERS.items():
        runs = _runs(found, adapter)
        if runs:
            cells = [_summary(runs.get(name, {})) for name in found]
            lines.append(line(title, *cells))
            told += faults(runs, "failed")
    return "\n".join([f"{_HEAD}{chr(10).join([*lines, *_and(told)])}", _TAIL])


def _and(faults_told: Sequence[str]) -> list[str]:
    return ["", *(f"- {fault}" for fault in faults_told)] if faults_told else []


def _runs(found: Found, adapter: str) -> dict[str, Verdicts]:
    return {name: found[name][adapter]["layouts"] for name in found if adapter in found[name]}


def _summary(run: Verdicts) -> str:
    """Return a table cell for one adapter on one Megatron: how many layouts passed, of those
    judged, and the largest error as a fraction of the allowed error.
    """
    made = [
        [checks[name] for name in (*STEPS, "same-bits") if name in checks]
        for checks in run.values()
    ]
    judged = [steps for steps in made if {"passed", "failed"} & {step[0] for step in steps}]
    if not judged:
        return "–"
    passed = sum(all(verdict != "failed" for verdict, *_ in steps) for steps in judged)
    largest = max(part for steps in judged for _, part, _ in steps)
    count = f"{passed}/{len(judged)}" if passed == len(judged) else f"**{passed}**/{len(judged)}"
    return f"{count}, {largest:.2g}" if largest else count


def grid(found: Found) -> Iterator[_grid.Section]:
    """Yield the sections of docs/layouts.md's grid: for each adapter its results by layout and its
    faults, and one section with all checks of `TrainStep`.
    """
    for adapter, title in ADAPTERS.items():
        runs = _runs(found, adapter)
        if runs:
            blocks = _bits(runs) if adapter == "OrderStable" else [_table(runs)]
            told = faults(runs, "failed")
            yield _grid.section(title, *blocks, *([{"list": told}] if told else []))
    yield from _others(found)


def _table(runs: Mapping[str, Verdicts]) -> _grid.Block:
    layouts = dict.fromkeys(layout for run in runs.values() for layout in run)
    return _grid.table(
        ["layout", *runs],
        (
            [f"`{layout}`", *(_cell(run.get(layout, {})) for run in runs.values())]
            for layout in layouts
        ),
    )


def _bits(runs: Mapping[str, Verdicts]) -> list[_grid.Block]:
    """Return an explanation and a table about the check `same-bits`, which trains twice on the same
    microbatches. A row is for the layouts that differ only in their number of replicas; for each
    Megatron a cell lists the numbers of replicas with equal bits, or says "differ" if the check
    failed for one.
    """
    alike: dict[str, list[str]] = {}
    for layout in dict.fromkeys(layout for run in runs.values() for layout in run):
        alike.setdefault(without_replicas(layout), []).append(layout)
    rows = []
    for name, layouts in alike.items():
        cells = []
        for run in runs.values():
            verdicts = {
                str(named(layout).replicas): run[layout]["same-bits"][0]
                for layout in layouts
                if "same-bits" in run.get(layout, {})
            }
            failed = "failed" in verdicts.values()
            passed = [number for number, verdict in verdicts.items() if verdict == "passed"]
            cells.append("differ" if failed else ", ".join(passed) or "–")
        rows.append([f"`{name}`", *cells])
    explanation = (
        "Two steps over the same twelve microbatches, in one call, and in two and backwards. A "
        "cell has the numbers of replicas on which the parameters have the same bits after that."
    )
    return [{"text": explanation}, _grid.table(["layout", *runs], rows)]


def faults(runs: Mapping[str, Verdicts], *counted: str) -> list[str]:
    """Return a line for each distinct error message of checks with a verdict in `counted`, such as
    "failed". The line lists the Megatrons, layouts and checks with this message, and then the
    message.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, layouts in runs.items():
        for layout, checks in layouts.items():
            for check, (verdict, _, fault) in checks.items():
                if verdict in counted:
                    at = found.setdefault(fault, {}).setdefault(f"{name}, `{layout}`,", [])
                    at.append(f"`{check}`")
    lines = []
    for fault, where in found.items():
        places = "; ".join(f"{at} {', '.join(checks)}" for at, checks in where.items())
        lines.append(f"{places}: {fault}")
    return lines


def _others(found: Found) -> Iterator[_grid.Section]:
    """Yield one grid section with a table of `TrainStep`'s checks. For each Megatron a cell says in
    how many layouts the check passed, of those with a verdict "passed" or "failed". Yield nothing
    if `TrainStep` was not run.
    """
    runs = {
        name: adapters["SplitStep"] for name, adapters in found.items() if "SplitStep" in adapters
    }
    if not runs:
        return
    rows = []
    for name, check in CHECKS.items():
        cells, all_verdicts = [], set()
        for run in runs.values():
            verdicts = [checks[name][0] for checks in run["layouts"].values() if name in checks]
            all_verdicts |= set(verdicts)
            passed, failed = verdicts.count("passed"), verdicts.count("failed")
            if passed + failed:
                cells.append(f"{passed} of {passed + failed}")
            else:  # the check may be newer than the run
                cells.append("–" if verdicts else "not run")
        # Otherwise another adapter's table tells of it.
        if not all_verdicts or all_verdicts - {"not offered", "not judged"}:
            rows.append([f"`{name}`", *cells, check.summary])
    explanation = (
        "In how many of these layouts `TrainStep` passes each check, of those in which it is made; "
        "– where it is made in none, and not run where the check is newer than the run."
    )
    head = ["check", *(f"{name}, {run['date']}" for name, run in runs.items()), "it demands that"]
    yield _grid.section(
        "`TrainStep`: faults, resumes and the rest", {"text": explanation}, _grid.table(head, rows)
    )


def _cell(checks: Mapping[str, Sequence[Any]]) -> str:
    steps = [checks[name] for name in STEPS if name in checks]
    if any(verdict == "failed" for verdict, *_ in steps):
        return "failed"
    if not any(verdict == "passed" for verdict, *_ in steps):
        return "–"
    return f"{max(part for _, part, _ in steps):.2g}"


def line(*cells: str) -> str:
    """Return a line of a Markdown table with these cells."""
    return f"| {' | '.join(cells)} |"


def write(folders: Sequence[str], found: Path, read: Callable[[Path], Found]) -> Found:
    """Merge the results that `read` finds in the folders into the JSON file `found`, where they
    replace results of the same checks. Return all results in the file.
    """
    known = json.loads(found.read_text("utf-8")) if found.exists() else {}
    for folder in folders:
        for megatron, adapters in read(Path(folder)).items():
            for adapter, run in adapters.items():
                # So that a few layouts can be run again.
                before = known.setdefault(megatron, {}).setdefault(adapter, {"layouts": {}})
                before["date"] = run["date"]
                for layout, checks in run["layouts"].items():
                    before["layouts"].setdefault(layout, {}).update(checks)
    known = dict(sorted(known.items(), key=lambda item: place(item[0])))
    found.write_text(f"{json.dumps(known)}\n", encoding="utf-8")
    return known


def main(argv: Sequence[str], root: Path) -> int:
    """Merge the results in the given folders, if any, into docs/layouts.json; write docs/layouts.md
    and its grid.
    """
    found = write(argv, root / FOUND, read)
    (root / PAGE).write_text(page(found), encoding="utf-8")
    _grid.write(root, PAGE.stem, grid(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path.cwd()))
