"""Measures what `apply()` costs a program before it imports Megatron, and at that import.

    python -m benchmarks.apply_cost [--rounds 3] [--json]

`import megatron_idempotent; apply()` in fresh interpreters, taken in turn with two yardsticks: an
interpreter that does nothing, and one that imports asyncio from the standard library. CPU time,
because that is what is repeatable. Once with compiled files, and once without, as in containers
where none may be written.

At the import of Megatron its sources are read and compared, and the patches land: the CPU time of
`import megatron.training` with all patches, as a part of what it takes without.

And where Megatron is imported already, as in a framework's worker: `apply()`, `report()`, and the
memory that both keep, on the installed release, and on a commit, which is a copy of the release
with one line more in each file.

The same for the entry points, which pytest and vLLM load in processes that use nothing of this
package: pytest, or torch, is imported before the clock starts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._record import options, progress, tell

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

_IMPORTED = "import torch, megatron.training.training, megatron.core.models.gpt"
WITH_MEGATRON = {
    "import Megatron": ("import torch", _IMPORTED),
    "import megatron_idempotent; apply()": (
        _IMPORTED,
        "import megatron_idempotent as m; m.apply()",
    ),
    "report()": (f"{_IMPORTED}, megatron_idempotent as m; m.apply()", "m.report()"),
}
_KEPT = f"""
{_IMPORTED}
import gc, tracemalloc
gc.collect(); tracemalloc.start()
import megatron_idempotent as m
m.apply(); m.report(); gc.collect()
print(tracemalloc.get_traced_memory()[0])
"""


def _cpu_ms(before: str, program: str, environ: dict[str, str]) -> float:
    timed = (
        f"import time; {before}; t = time.process_time(); {program}; print(time.process_time() - t)"
    )
    return 1000 * _printed(timed, environ)


def _printed(program: str, environ: dict[str, str]) -> float:
    """Run a program in a fresh interpreter; return the last number that it prints."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )
    return float(result.stdout.split()[-1])


def _measure(
    part: str,
    environ: dict[str, str],
    programs: dict[str, tuple[str, str]],
    yardstick: str,
    rounds: int,
) -> dict[str, dict[str, float]]:
    """Time programs in fresh interpreters; return the median and least CPU milliseconds of each,
    and its median ÷ that of `yardstick`.
    """
    progress(f"{part}: {rounds} rounds of {len(programs)} programs")
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


def _commit_of(folder: Path) -> Path:
    """Copy the installed Megatron into a folder, and append a line to each file, so that the copy
    counts as a commit and not as a release. Return the folder.
    """
    (place,) = find_spec("megatron.core").submodule_search_locations  # type: ignore[union-attr]
    shutil.copytree(Path(place).parent, folder / "megatron")
    for file in (folder / "megatron").rglob("*.py"):
        with file.open("a") as text:
            text.write("\n# one line more\n")
    return folder


def _with_megatron(part: str, environ: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """Measure `apply()` and `report()` after Megatron is imported: CPU milliseconds, and the memory
    that they keep.
    """
    found = _measure(part, environ, WITH_MEGATRON, "import Megatron", rounds)
    return {**found, "kept": {"MiB": _printed(_KEPT, environ) / 2**20}}


def main() -> None:
    """Print the CPU times of imports and of `apply()`: for each measured program the median, the
    least, and the median ÷ that of a program which does not use this package.
    """
    parser = options(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=3, help="a third of them import Megatron, or compile"
    )
    asked = parser.parse_args()
    seldom = max(1, asked.rounds // 3)
    compiled, small = {"PYTHONDONTWRITEBYTECODE": ""}, (PROGRAMS, "import asyncio")
    found = {}

    def measure(part: str, *programs: Any, **environ: str) -> None:
        found[part] = _measure(part, environ, *programs)

    measure("with compiled files", *small, asked.rounds, **compiled)
    with tempfile.TemporaryDirectory() as empty:
        # Looked for there, of this package and of the standard library alike.
        without = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": empty}
        measure("without compiled files", *small, seldom, **without)
    at_import = (AT_IMPORT, "import megatron.training", seldom)
    measure("at the import of Megatron", *at_import, **compiled)
    with tempfile.TemporaryDirectory() as folder:
        commit = {"PYTHONPATH": str(_commit_of(Path(folder)))}
        for kind, path in (("a release", {}), ("a commit", commit)):
            part = f"with Megatron imported, {kind}"
            found[part] = _with_megatron(part, compiled | path, seldom)
    tell(found, asked.json)


if __name__ == "__main__":
    main()
