"""Writes docs/benchmarks.md, its grid and its pictures: what benchmarks found.

`python -m benchmarks.page FOLDER` merges the files in that folder into docs/benchmarks.json and
writes the page again; `--machine h100` merges into docs/benchmarks-h100.json, which the page shows
beside it. `python -m benchmarks --json FOLDER` leaves in the folder what each benchmark found, as
`NAME.json`. The page has the ratios that decide something, and the grid all of them, with machine
and date. Both have only ratios within one run: seconds of another machine say nothing.
`benchmarks/meanings.toml` says what they mean.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomllib

from benchmarks import _grid
from benchmarks._drawing import Bar, bars, number
from benchmarks._record import leaves

DOCS = Path("docs")
PAGE = DOCS / "benchmarks.md"
PICTURES = Path("assets", "benchmarks")
#: Use per core before a run from which on another process had a good part of a core.
BUSY = 0.25
#: Bars up to which a picture's text for those who do not see it has each of them.
MANY = 6
MEANINGS = tomllib.loads(Path(__file__).with_name("meanings.toml").read_text("utf-8"))
_BOUNDS = {"at_most": "at most", "at_least": "at least"}

Runs = Mapping[str, Mapping[str, Any]]
"""Maps a benchmark to `ran`, `arguments`, `machine` and `found`."""

_HEAD = """\
# Benchmarks

Each number is a ratio of two sides that took turns in one run, so that it can be compared between
machines. Do not quote a number that is marked *busy*: another process had a part of its machine.
"""
_TAIL = """\
The dates, the machines, every other number and the pictures are in
[the grid](assets/grids/benchmarks.json), which the site draws below this paragraph; a red mark in a
picture is the limit that we hold a number to.

    python -m benchmarks --json build/benchmarks   # or some, by their names
    python -m benchmarks.page build/benchmarks     # of a GPU: --machine h100
"""


def read(folder: Path) -> Runs:
    """Read the results that `python -m benchmarks --json` wrote to `folder/NAME.json`; return them
    by benchmark.

    Raises:
        ValueError: there is none, one is no result, or is of an unknown benchmark.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem not in MEANINGS:
            raise ValueError(
                f"{path} is of no benchmark with ratios: known are {', '.join(MEANINGS)}"
            )
        try:
            run = json.loads(path.read_text("utf-8"))
            found[path.stem] = {
                name: run[name] for name in ("ran", "arguments", "machine", "found")
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not what `python -m benchmarks --json` writes: {error!r}"
            ) from None
        if not ratios(path.stem, found[path.stem]["found"]):
            raise ValueError(f"{path} has no ratio named like {MEANINGS[path.stem]['numbers']!r}")
    if not found:
        raise ValueError(f"{folder} has no NAME.json: `python -m benchmarks --json` writes them")
    return found


def ratios(name: str, found: Any) -> dict[str, float]:
    """Return those numbers of a benchmark's results that are ratios, by name, as meanings.toml
    selects them.
    """
    numbers = {
        label.removesuffix(", value"): float(value)
        for label, value in leaves("", found)
        if not isinstance(value, (str, bool))
    }
    wanted = MEANINGS[name]["numbers"]
    return {label: value for label, value in numbers.items() if re.search(wanted, label)}


def page(machines: Mapping[str, Runs]) -> str:
    """Return the text of docs/benchmarks.md: the ratios that decide something, for each machine.

    `machines` has the runs of each machine, by its label.
    """
    rows = []
    for name, meaning in MEANINGS.items():
        for what, template in meaning["decides"]:
            cells = [_decided(name, template, runs[name]) for runs in _each(machines, name)]
            if any(cells):
                rows.append(f"| {what} | {' | '.join(cell or '–' for cell in cells)} |")
    parts = [_HEAD, f"| | {' | '.join(machines)} |", f"|---|{'---|' * len(machines)}", *rows, ""]
    missing = [name for name in MEANINGS if not any(name in runs for runs in machines.values())]
    if missing:
        parts += [f"Not run yet: {', '.join(f'`{name}`' for name in missing)}.", ""]
    return "\n".join([*parts, _TAIL])


def _each(machines: Mapping[str, Runs], name: str) -> Iterator[Runs]:
    """Yield each machine's results by benchmark; `{name: {}}` for a machine that has not run the
    benchmark `name`.
    """
    for runs in machines.values():
        yield runs if name in runs else {name: {}}


def _decided(name: str, template: str, run: Mapping[str, Any]) -> str:
    """Return a table cell about one machine: `template`, a text of meanings.toml, with the ratios
    of `run` filled in; "" if a ratio was not measured. It says "busy" if the machine was.
    """
    told = _filled(template, ratios(name, run["found"])) if run else None
    return "" if told is None else f"{told}{', busy' if _busy(run) else ''}"


def grid(machines: Mapping[str, Runs], summaries: Mapping[str, str]) -> Iterator[_grid.Section]:
    """Yield a section for each benchmark that has a saved run: sentences, a picture, and all of its
    ratios. The docs site unfolds these sections below a link in docs/benchmarks.md.
    """
    for name, meaning in MEANINGS.items():
        shown = {label: runs[name] for label, runs in machines.items() if name in runs}
        if not shown:
            continue
        blocks: list[_grid.Block] = [{"text": summaries[name]}]
        for label, run in shown.items():
            told = " ".join(_sentences(name, ratios(name, run["found"])))
            busy = " The machine was busy, so this has to be run again." if _busy(run) else ""
            blocks.append({"text": f"{label}: {told}{busy}"})
        if rows := _bars(name, shown):
            told = "; ".join(f"{row.group} {row.side} {number(row.value)}".strip() for row in rows)
            if len(rows) > MANY:
                values = [row.value for row in rows]
                told = f"{len(rows)} bars from {number(min(values))} to {number(max(values))}"
            alt = f"1.0 is {meaning['one']}: {told}"
            blocks.append({"picture": f"../{PICTURES.name}/{name}.svg", "alt": alt})
        for label, run in shown.items():
            asked = [argument for argument in run["arguments"] if argument != "--json"]
            command = " ".join(["python -m benchmarks", name, *asked])
            blocks.append({"text": f"`{command}` on {label}: {_told(run)}"})
            numbers = ratios(name, run["found"])
            blocks.append(_grid.table(["", "ratio"], ([at, number(numbers[at])] for at in numbers)))
        yield _grid.section(meaning["title"], *blocks)


def pictures(machines: Mapping[str, Runs]) -> dict[str, str]:
    """Return an SVG bar chart for each benchmark that has bars, by the benchmark's name."""
    drawn = {}
    for name, meaning in MEANINGS.items():
        shown = {label: runs[name] for label, runs in machines.items() if name in runs}
        if rows := _bars(name, shown):
            drawn[name] = bars(meaning["title"].replace("`", ""), meaning["one"], rows)
    return drawn


def _sentences(name: str, numbers: Mapping[str, float]) -> Iterator[str]:
    """Yield the sentences that meanings.toml has about a benchmark, filled with the ratios in
    `numbers`. A sentence with a ratio that was not measured is left out.
    """
    for sentence in MEANINGS[name]["says"]:
        filled = _filled(sentence, numbers)
        if filled is not None:
            yield filled


def _filled(template: str, numbers: Mapping[str, float]) -> str | None:
    """Return a template with the measured ratios filled in, or None if a ratio in the template was
    not measured.

    `{pattern:.2f}` becomes the ratio of that name, or the least and the most of several.
    """
    parts = re.split(r"\{(.+?):([.\d%a-z]+)\}", " ".join(template.split()))
    for at in range(1, len(parts), 3):
        found = [value for each, value in numbers.items() if re.fullmatch(parts[at], each)]
        if not found:
            return None
        least, most = (format(each(found), parts[at + 1]) for each in (min, max))
        parts[at] = (least if least == most else f"{least} to {most}").replace("%", " %")
        parts[at + 1] = ""
    return "".join(parts)


def _bars(name: str, shown: Runs) -> list[Bar]:
    """Return the bars of a benchmark's picture, one per ratio and machine that meanings.toml
    selects. Bars with the same heading (`group`) are adjacent.
    """
    meaning = MEANINGS[name]
    found = []
    for label, run in shown.items():
        limits = {
            at.removesuffix(f", {key}"): (words, float(value))
            for at, value in leaves("", run["found"])
            for key, words in _BOUNDS.items()
            if at.endswith(f", {key}")
        }
        numbers = ratios(name, run["found"])
        for pattern, (at, value) in itertools.product(meaning["bars"], numbers.items()):
            match = re.fullmatch(pattern, at)
            if match is None:
                continue
            words = {"group0": label if len(shown) > 1 else "", **match.groupdict()}.items()
            group, side = (
                ", ".join(word for kind, word in words if word and kind.startswith(part))
                for part in ("group", "side")
            )
            ours = not re.fullmatch(meaning.get("others", "$."), side)
            shown_as = meaning.get("labels", {}).get(side, side)
            found.append(
                Bar(group=group, side=shown_as, value=value, ours=ours, limit=limits.get(at))
            )
    order = list(dict.fromkeys(bar.group for bar in found))
    return sorted(found, key=lambda bar: order.index(bar.group))


def _told(run: Mapping[str, Any]) -> str:
    its = run["machine"]
    versions = ", ".join(f"{each} {its[each]}" for each in ("torch", "megatron-core") if its[each])
    return f"{run['ran']}, {its['cpu']}, {its['cores']} cores, {versions}, Python {its['python']}."


def _busy(run: Mapping[str, Any]) -> bool:
    its = run["machine"]
    return bool(its["busy"] or (its.get("use_per_core") or 0) >= BUSY)


def summaries(root: Path) -> dict[str, str]:
    """Return the first paragraph of each benchmark's module docstring, by name; no benchmark is
    imported.
    """
    found = {}
    for name in MEANINGS:
        text = (root / "benchmarks" / f"{name}.py").read_text("utf-8")
        found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in found.items()}


def known(root: Path) -> dict[str, Runs]:
    """Read the results of all machines in docs/benchmarks*.json; return them by machine, such as
    "CPU".
    """
    files = sorted((root / DOCS).glob("benchmarks*.json"), key=lambda path: path.stem)
    return {
        path.stem.partition("-")[2].upper() or "CPU": json.loads(path.read_text("utf-8"))
        for path in files
    }


def main(argv: Sequence[str], root: Path) -> int:
    """Merge the results in the given folders, if any, into docs/; write docs/benchmarks.md, its
    grid and pictures.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--machine", default="", help="of these results, if it is not the CPU")
    asked = parser.parse_args(argv)
    into = root / DOCS / f"benchmarks{asked.machine and '-' + asked.machine}.json"
    if asked.folders:
        runs = dict(json.loads(into.read_text("utf-8"))) if into.exists() else {}
        for folder in asked.folders:
            runs |= read(folder)
        runs = {name: runs[name] for name in MEANINGS if name in runs}
        into.write_text(f"{json.dumps(runs, indent=1)}\n", encoding="utf-8")
    machines = known(root)
    (root / PAGE).write_text(page(machines), encoding="utf-8")
    _grid.write(root, "benchmarks", grid(machines, summaries(root)))
    folder = root / DOCS / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures(machines).items():
        (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path.cwd()))
