"""Writes docs/layouts.md: how near each layout's step came to its definition, on each Megatron.

`python -m benchmarks._layouts FOLDER` merges the files in that folder into
docs/layouts.json and writes the page again. `nox -s layouts` leaves there, for each Megatron and
adapter, what `certify --grid --json` said, as `MEGATRON/ADAPTER.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_idempotent.patching.releases import place
from megatron_idempotent.proof.certify import CHECKS
from megatron_idempotent.proof.certify import layout as named
from megatron_idempotent.proof.certify.run import alike as without_replicas

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
# Every layout, and every fault, against one definition

Each row is a layout ([certify.md](certify.md) has the words), and each column a Megatron: a
release, or a commit that frameworks pin. A cell has the largest error of any step as a part of the
bound that was derived for it, so that 1 would be at the bound: steps in one call and in three, with
gradient, norm, loss and next parameters against float64. The layouts are those of `certify --grid`,
in which each two words meet. [findings.md](findings.md) explains what failed.

This page is generated from [layouts.json](layouts.json) by
`python -m benchmarks._layouts`. `nox -s layouts -- 0.19.2 nemo-rl` runs
these two Megatrons again, and this a single row:

    megatron-idempotent certify --layout dp2-pp2 \\
      megatron_idempotent.proof.certify.adapters:SplitStep
"""


def read(folder: Path, known: Collection[str] = ADAPTERS) -> Found:
    """Read the results of `certify --json` in `folder/MEGATRON/ADAPTER.json`, of known adapters.

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
    """Return the page: a table for each adapter with its faults, and one of the other checks."""
    parts = [_HEAD]
    for adapter, title in ADAPTERS.items():
        runs: dict[str, Verdicts] = {
            name: found[name][adapter]["layouts"] for name in found if adapter in found[name]
        }
        if runs:
            table = _bits(runs) if adapter == "OrderStable" else _table(runs)
            parts += [f"## {title}", "", *table, ""]
            told = faults(runs, "failed")
            parts += [*told, ""] if told else []
    return "\n".join([*parts, *_others(found), ""])


def _table(runs: Mapping[str, Verdicts]) -> list[str]:
    layouts = dict.fromkeys(layout for run in runs.values() for layout in run)
    return [
        line("layout", *runs),
        line(*["---"] * (len(runs) + 1)),
        *(
            line(f"`{layout}`", *(_cell(run.get(layout, {})) for run in runs.values()))
            for layout in layouts
        ),
    ]


def _bits(runs: Mapping[str, Verdicts]) -> list[str]:
    """Return a table of layouts that differ in their number of replicas alone."""
    alike: dict[str, list[str]] = {}
    for layout in dict.fromkeys(layout for run in runs.values() for layout in run):
        alike.setdefault(without_replicas(layout), []).append(layout)
    lines = [
        "Two steps over the same twelve microbatches, in one call, and in two and backwards. A",
        "cell has the numbers of replicas on which the parameters have the same bits after that.",
        "",
        line("layout", *runs),
        line(*["---"] * (len(runs) + 1)),
    ]
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
            cells.append("**differ**" if failed else ", ".join(passed) or "–")
        lines.append(line(f"`{name}`", *cells))
    return lines


def faults(runs: Mapping[str, Verdicts], *counted: str) -> list[str]:
    """Return a line for each fault of these verdicts: the Megatrons, layouts and checks."""
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
        lines.append(f"- {places}: {fault}")
    return lines


def _others(found: Found) -> list[str]:
    """Return a table of `TrainStep`'s checks: in how many layouts each was made, and passed."""
    runs = {
        name: adapters["SplitStep"] for name, adapters in found.items() if "SplitStep" in adapters
    }
    if not runs:
        return []
    lines = [
        "## Faults, resumes and the rest",
        "",
        "In how many of these layouts `TrainStep` passes each check, of those in which it is made;",
        "– where it is made in none, and *not run* where the check is newer than the run:",
        "",
        line("check", *(f"{name}, {run['date']}" for name, run in runs.items()), "it demands that"),
        line(*["---"] * (len(runs) + 2)),
    ]
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
            lines.append(line(f"`{name}`", *cells, check.summary))
    return lines


def _cell(checks: Mapping[str, Sequence[Any]]) -> str:
    steps = [checks[name] for name in STEPS if name in checks]
    if any(verdict == "failed" for verdict, *_ in steps):
        return "**failed**"
    if not any(verdict == "passed" for verdict, *_ in steps):
        return "–"
    return f"{max(part for _, part, _ in steps):.2g}"


def line(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def write(folders: Sequence[str], found: Path, read: Callable[[Path], Found]) -> Found:
    """Merge the findings of the folders into a file, check by check, and return all of it."""
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
    """Merge the findings of the folder that is given, if one is, and write the page."""
    (root / PAGE).write_text(page(write(argv, root / FOUND, read)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path.cwd()))
