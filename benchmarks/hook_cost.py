"""Measures what the hook costs a process that never imports Megatron.

    python -m benchmarks.hook_cost [--json]

New interpreters start alternately in two virtual environments that are otherwise empty: one without
the hook, and one with it, where the variable is unset or set. Measured are the CPU time from the
start of the process to the first line of the program, and the resident memory at that line. The
results are lower quartiles.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
import venv
from pathlib import Path

from benchmarks._record import options, tell
from megatron_idempotent.cli.hook import PTH, PTH_LINE

ROUNDS = 60
PROGRAM = "import time; print(time.process_time(), open('/proc/self/statm').read().split()[1])"
PAGE_KIB = os.sysconf("SC_PAGESIZE") / 1024


def _environment(folder: Path, hook: str) -> Path:
    """Make a virtual environment that has this package on its path, and a .pth file with the
    content `hook`; return the path of its Python.

    `hook` is the content of the hook's .pth file.
    """
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    root = Path(__file__).parents[1]
    (packages / "a_checkout.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    (packages / PTH).write_text(hook)
    return folder / "bin" / "python"


def _measure(python: Path, environ: dict[str, str]) -> tuple[float, float]:
    """Start Python once; return the CPU time in milliseconds and the resident memory in KiB when
    its program begins.
    """
    started = [python, "-c", PROGRAM]
    done = subprocess.run(started, env=environ, capture_output=True, text=True, check=True)
    seconds, pages = done.stdout.split()
    return 1000 * float(seconds), int(pages) * PAGE_KIB


def main() -> None:
    """Print the CPU time and memory of a Python start, and what this package's .pth hook adds to
    them.
    """
    asked = options(__doc__).parse_args()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
    kept = {**kept, "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as folder:
        bare = _environment(Path(folder, "bare"), "\n")
        hooked = _environment(Path(folder, "hooked"), PTH_LINE)
        arms = {
            "a start": (bare, kept),
            "the hook, variable unset": (hooked, kept),
            "the hook, variable set": (hooked, {**kept, "MEGATRON_IDEMPOTENT": "1"}),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            for name, (python, environ) in arms.items():
                found[name].append(_measure(python, environ))
    quarter = ROUNDS // 4  # other processes can only increase the times
    best = {
        name: [sorted(n)[quarter] for n in zip(*each, strict=True)] for name, each in found.items()
    }
    start_ms, start_kib = best.pop("a start")
    added = {
        name: {"added_ms": ms - start_ms, "added_kib": kib - start_kib, "of a start": ms / start_ms}
        for name, (ms, kib) in best.items()
    }
    tell({"a start": {"ms": start_ms, "kib": start_kib}, **added}, asked.json)


if __name__ == "__main__":
    main()
