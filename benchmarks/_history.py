"""Draws docs/assets/history.svg: the share of patches that land, by the day of Megatron's commit.

`python tools/history.py CLONE --json > found.json` takes minutes;
`python -m benchmarks._history found.json` then writes docs/history.json and the picture, and
`python tools/casebook.py` the numbers on the page.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import tomllib

from benchmarks._drawing import BOUND, OURS, path, picture, words

FOUND = Path("docs", "history.json")
PICTURE = Path("docs", "assets", "history.svg")
_LEFT, _RIGHT, _TOP, _HEIGHT = 40, 770, 120, 150


def draw(found: dict[str, list[dict[str, Any]]], pins: list[dict[str, Any]]) -> str:
    """Return an SVG picture: a curve for each branch of Megatron, with the percentage of patches
    that apply over time, and a line at each commit that a framework pins.
    """
    ends = [run[end] for runs in found.values() for run in runs for end in ("since", "until")]
    days = [date.fromisoformat(end) for end in ends]
    first = min(days)
    scale = (_RIGHT - _LEFT) / (max(days) - first).days

    def x(day: str) -> float:
        return _LEFT + (date.fromisoformat(day) - first).days * scale

    parts = []
    bottom = _TOP + len(found) * (_HEIGHT + 40) - 40
    for row, (branch, runs) in enumerate(found.items()):
        shares = [100 * run["landed"] / (run["landed"] + len(run["refused"])) for run in runs]
        lowest = min(85, 5 * (min(shares) // 5))
        top = _TOP + row * (_HEIGHT + 40)

        def y(share: float, top: float = top, lowest: float = lowest) -> float:
            return top + _HEIGHT * (100 - share) / (100 - lowest)

        parts.append(words(8, top - 10, f"{branch}: patches that land, %"))
        for mark in (lowest, 99, 100):
            dashes = ' stroke-dasharray="2 3"' if mark == 99 else ' stroke-opacity="0.4"'
            parts.append(path(f"M{_LEFT} {y(mark):.1f}H{_RIGHT}", more=dashes))
            if mark != 99:
                parts.append(words(_LEFT - 6, y(mark) + 4, f"{mark:g}", ' text-anchor="end"'))
        steps = [f"H{x(run['since']):.1f}V{y(s):.1f}" for run, s in zip(runs, shares, strict=True)]
        steps[0] = f"M{x(runs[0]['since']):.1f} {y(shares[0]):.1f}"
        steps.append(f"H{x(runs[-1]['until']):.1f}")
        parts.append(path("".join(steps), OURS, ' stroke-width="2"'))
    for month in sorted({day.replace(day=1) for day in days}):
        if month >= first and month.month % 2:
            at = x(month.isoformat())
            parts.append(words(at, bottom + 20, f"{month:%Y-%m}", ' text-anchor="middle"'))
    last = 0.0
    for pin in sorted(pins, key=lambda pin: pin["date"]):
        at = x(pin["date"])
        parts.append(path(f"M{at:.1f} {_TOP}V{bottom}", BOUND, ' stroke-opacity="0.7"'))
        last = max(at, last + 13)  # shift a name that would overlap the previous one
        turned = f' font-size="11" transform="rotate(-60 {last:.1f} {_TOP - 24})"'
        parts.append(words(last, _TOP - 24, pin["name"], turned))
    return picture(_RIGHT + 90, bottom + 32, "Share of the patches that land", parts)


def main(argv: list[str], root: Path) -> int:
    """Copy the results of `tools/history.py` from the file that `argv` names to docs/history.json,
    and draw the picture of them; return the exit code.
    """
    (file,) = argv
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    (root / FOUND).write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    (root / PICTURE).write_text(draw(found, pinned(found, root)), encoding="utf-8")
    return 0


def pinned(found: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """Return those commits in pyproject.toml's list that frameworks pin in Megatron's own
    repository. The list also has the tips of branches; entries named like a branch in `found` are
    left out.
    """
    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    commits = table["tool"]["megatron-idempotent"]["commits"]
    return [each for each in commits if each["name"] not in found and "repository" not in each]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path.cwd()))
