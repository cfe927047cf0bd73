"""Writes docs/benchmarks.md: the ratios that benchmarks found, with the machine and the date.

`python -m benchmarks.page FOLDER` merges the files in that folder into docs/benchmarks.json and
writes the page again. `python -m benchmarks --json FOLDER` leaves there what each benchmark found,
as `NAME.json`. Only ratios within one run are shown: seconds of another machine say nothing.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._record import leaves

FOUND = Path("docs", "benchmarks.json")
PAGE = Path("docs", "benchmarks.md")
#: Use per core before a run from which on another process had a good part of a core.
BUSY = 0.25
#: Of each benchmark's numbers those that are ratios, by the end or the beginning of their names.
RATIOS = {
    "apply_cost": r"apply\(\), of import asyncio$",
    "hook_cost": r", of a start$",
    "rank_calls": r"^ratio$",
    "cpu_overhead": r"^ratio, ",
    "patched_step": r"ratio$|of_lower_quartiles$",
    "split_step": r"\)/\(|, bubbles$|^memory, ",
    "packing": r"^step, |, (above|padding|waiting|by work|given)$",
    "token_logprobs": r", (time, \d|memory)$",
    "distillation": r", (time|memory)$",
    "weight_export": r", bandwidth_to_save_file, |, memory, ",
    "weight_sync": r"^pause/sync$",
    "weight_deltas": r"(changed|of_the_model|of_the_bound)$",
    "weight_transports": r", of_a_copy$",
    "workers": r"÷ empty call$",
    "async_against_sync": r"÷ sync$",
    "async_simulated": r"^ratios, |, (efficiency|useful|wasted)$",
}

Runs = Mapping[str, Mapping[str, Any]]
"""Maps a benchmark to `ran`, `arguments`, `machine` and `found`."""

_HEAD = """\
# Benchmarks

What each program of [benchmarks/](../benchmarks) found. Each number is a ratio of two sides that
took turns in one run, so that it can be compared between machines; the program's documentation says
what stands above and below the line. A run on a machine that was busy is marked: do not quote it.

This page is generated from [benchmarks.json](benchmarks.json):

    python -m benchmarks --json build/benchmarks     # or some: python -m benchmarks apply_cost …
    python -m benchmarks.page build/benchmarks
"""


def read(folder: Path) -> Runs:
    """Read the results of `python -m benchmarks --json` in `folder/NAME.json`.

    Raises:
        ValueError: there is none, one is no result, or is of an unknown benchmark.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem not in RATIOS:
            raise ValueError(
                f"{path} is of no benchmark with ratios: known are {', '.join(RATIOS)}"
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
        if not dict(ratios(path.stem, found[path.stem]["found"])):
            raise ValueError(f"{path} has no ratio named like {RATIOS[path.stem]!r}")
    if not found:
        raise ValueError(f"{folder} has no NAME.json: `python -m benchmarks --json` writes them")
    return found


def ratios(name: str, found: Any) -> Iterator[tuple[str, float]]:
    """Yield the ratios among what a benchmark found, with their names."""
    for label, value in leaves("", found):
        if not isinstance(value, (str, bool)) and re.search(RATIOS[name], label):
            yield label, float(value)


def page(runs: Runs, summaries: Mapping[str, str]) -> str:
    """Return the page: a table of ratios for each benchmark, and those that were not run."""
    parts = [_HEAD]
    for name in RATIOS:
        if name not in runs:
            continue
        run = runs[name]
        command = " ".join(["python -m benchmarks", name, *_shown(run["arguments"])])
        parts += [f"## {name}", "", summaries[name], "", f"    {command}", "", _told(run), ""]
        parts += ["| | ratio |", "| --- | --- |"]
        parts += [
            f"| {_cell(label)} | {value:.3g} |" for label, value in ratios(name, run["found"])
        ]
        parts.append("")
    missing = [name for name in RATIOS if name not in runs]
    if missing:
        parts += ["## Not run yet", "", *(f"- `{name}`: {summaries[name]}" for name in missing), ""]
    return "\n".join(parts)


def _shown(arguments: Sequence[str]) -> list[str]:
    return [each for each in arguments if each != "--json"]


def _cell(label: str) -> str:
    return label.replace("|", "\\|")


def _told(run: Mapping[str, Any]) -> str:
    its = run["machine"]
    versions = ", ".join(f"{each} {its[each]}" for each in ("torch", "megatron-core") if its[each])
    told = f"{run['ran']}, {its['cpu']}, {its['cores']} cores, {versions}, Python {its['python']}."
    busy = its["busy"] or (its.get("use_per_core") or 0) >= BUSY
    return told + (" **The machine was busy**, so that this has to be run again." if busy else "")


def summaries(root: Path) -> dict[str, str]:
    """Return the first sentence of each benchmark's own documentation; import none of them."""
    found = {}
    for name in RATIOS:
        text = (root / "benchmarks" / f"{name}.py").read_text("utf-8")
        found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in found.items()}


def main(argv: Sequence[str], root: Path) -> int:
    """Merge the results of the folder that is given, if one is, and write the page."""
    known = json.loads((root / FOUND).read_text("utf-8")) if (root / FOUND).exists() else {}
    for folder in argv:
        known |= read(Path(folder))
    known = {name: known[name] for name in RATIOS if name in known}
    (root / FOUND).write_text(f"{json.dumps(known, indent=1)}\n", encoding="utf-8")
    (root / PAGE).write_text(page(known, summaries(root)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path.cwd()))
