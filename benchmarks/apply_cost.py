"""Measures what `import megatron_idempotent; apply()` costs a program before it imports Megatron.

Fresh interpreters, taken in turn with two yardsticks: an interpreter that does nothing, and one
that imports asyncio from the standard library. CPU time, because that is what is repeatable. Once
with compiled files, and once without, as in containers where none may be written.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 15
PROGRAMS = {
    "nothing": "pass",
    "import asyncio": "import asyncio",
    "import megatron_idempotent; apply()": "import megatron_idempotent as m; m.apply()",
}


def _cpu_ms(program: str, environ: dict[str, str]) -> float:
    timed = f"import time; t = time.process_time(); {program}; print(time.process_time() - t)"
    result = subprocess.run(
        [sys.executable, "-c", timed],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )
    return 1000 * float(result.stdout)


def _measure(heading: str, environ: dict[str, str]) -> None:
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name, program in PROGRAMS.items():
            times[name].append(_cpu_ms(program, environ))
    yardstick = statistics.median(times["import asyncio"])
    print(heading)
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"  {name:40} median {median:6.1f} ms, min {min(values):6.1f} ms, "
            f"{median / yardstick:5.2f} x import asyncio"
        )


def main() -> None:
    """Print median and minimum per program, and the ratio to the yardstick."""
    _measure("with compiled files", {"PYTHONDONTWRITEBYTECODE": ""})
    with tempfile.TemporaryDirectory() as empty:
        # Looked for there, of this package and of the standard library alike.
        _measure(
            "without compiled files",
            {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": empty},
        )


if __name__ == "__main__":
    main()
