"""Measures what `apply()` costs a program before it imports Megatron, and at that import.

    python -m benchmarks.apply_cost [--json]

`import megatron_idempotent; apply()` in fresh interpreters, taken in turn with two yardsticks: an
interpreter that does nothing, and one that imports asyncio from the standard library. CPU time,
because that is what is repeatable. Once with compiled files, and once without, as in containers
where none may be written.

At the import of Megatron its sources are read and compared, and the patches land: the CPU time of
`import megatron.training` with all patches, as a part of what it takes without.

The same for the entry points, which pytest and vLLM load in processes that use nothing of this
package: pytest, or torch, is imported before the clock starts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import distribution

from benchmarks._record import options, tell

ROUNDS = 20
PROGRAMS = {
    "nothing": ("pass", "pass"),
    "import asyncio": ("pass", "import asyncio"),
    "import megatron_idempotent; apply()": ("pass", "import megatron_idempotent as m; m.apply()"),
    **{
        f"{point.group}, {point.name}": (
            "import pytest" if point.group == "pytest11" else "import torch",
            f"import {point.module}",
        )
        for point in distribution("megatron-idempotent").entry_points
        if point.group != "console_scripts"
    },
}
"""Maps a name to what runs before the clock, and to what is measured."""

AT_IMPORT = {
    "import megatron.training": ("import torch", "import megatron.training"),
    "import megatron.training, patched": (
        "import torch, megatron_idempotent as m",
        "m.apply(); import megatron.training",
    ),
}
ROUNDS_AT_IMPORT = 5


def _cpu_ms(before: str, program: str, environ: dict[str, str]) -> float:
    timed = (
        f"import time; {before}; t = time.process_time(); {program}; print(time.process_time() - t)"
    )
    result = subprocess.run(
        [sys.executable, "-c", timed],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )
    return 1000 * float(result.stdout)


def _measure(
    environ: dict[str, str], programs: dict[str, tuple[str, str]], yardstick: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Return median and least milliseconds of each program, and the ratio of medians."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (before, program) in programs.items():
            times[name].append(_cpu_ms(before, program, environ))
    of = statistics.median(times[yardstick])
    return {
        name: {
            "median_ms": statistics.median(values),
            "min_ms": min(values),
            f"of {yardstick}": statistics.median(values) / of,
        }
        for name, values in times.items()
    }


def main() -> None:
    """Print median and minimum per program, and the ratio to the yardstick."""
    asked = options(__doc__).parse_args()
    compiled, small = {"PYTHONDONTWRITEBYTECODE": ""}, (PROGRAMS, "import asyncio", ROUNDS)
    found = {"with compiled files": _measure(compiled, *small)}
    with tempfile.TemporaryDirectory() as empty:
        # Looked for there, of this package and of the standard library alike.
        found["without compiled files"] = _measure(
            {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": empty}, *small
        )
    found["at the import of Megatron"] = _measure(
        compiled, AT_IMPORT, "import megatron.training", ROUNDS_AT_IMPORT
    )
    tell(found, asked.json)


if __name__ == "__main__":
    main()
