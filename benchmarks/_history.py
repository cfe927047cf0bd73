"""Draws docs/assets/history.svg: the share of patches that land, by the day of Megatron's commit.

`megatron-idempotent drift --history CLONE --json > found.json` takes minutes;
`python -m benchmarks._history found.json` then writes docs/history.json and the picture, and
`python -m megatron_idempotent.cli.casebook` the numbers on the page.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import tomllib

FOUND = Path("docs", "history.json")
PICTURE = Path("docs", "assets", "history.svg")


def draw(found: dict[str, list[dict[str, Any]]], pins: list[dict[str, Any]], path: Path) -> None:
    """Draw a row for each branch, with a line at each commit that a framework pins."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same file for the same numbers.
    matplotlib.rcParams.update({"svg.hashsalt": "history", "svg.fonttype": "none"})
    figure, _ = pyplot.subplots(len(found), 1, sharex=True, figsize=(9, 2.4 * len(found)))
    for axis, (branch, runs) in zip(figure.axes, found.items(), strict=True):
        days = [date.fromisoformat(run["since"]) for run in runs]
        shares = [100 * run["landed"] / (run["landed"] + len(run["refused"])) for run in runs]
        end = date.fromisoformat(runs[-1]["until"])
        axis.step([*days, end], [*shares, shares[-1]], where="post", color="#2a6f97")
        axis.axhline(99, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_ylim(min(85, min(shares) - 1), 101)
        axis.set_ylabel(f"{branch}: patches\nthat land, %")
        axis.grid(axis="y", linewidth=0.3)
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    for pin in pins:
        day = date.fromisoformat(pin["date"])
        for axis in figure.axes:
            axis.axvline(day, color="#c1666b", linewidth=0.7)
        figure.axes[0].annotate(
            pin["name"], (day, 101), rotation=60, fontsize=7, annotation_clip=False
        )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main(argv: list[str]) -> int:
    """Write what the file has into docs/, and the picture of it; return the exit code."""
    (file,) = argv
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    table = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    pins = [
        commit
        for commit in table["tool"]["megatron-idempotent"]["commits"]
        if commit["name"] not in found and "repository" not in commit
    ]
    FOUND.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    draw(found, pins, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
