"""Starts programs for tests of doors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "megatron_idempotent")
LOADED = "import sys; print(*sorted(m for m in sys.modules if m.startswith('megatron')))"
#: A program that imports Megatron, if there is one, and says whether patches were applied.
IMPORTS = """
import sys
try:
    import megatron
except ModuleNotFoundError:
    pass
print("megatron_idempotent.patching.api" in sys.modules)
"""


def environment(**given: str) -> dict[str, str]:
    """Return this process's environment without this package's variables, and with `given`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
    return {**kept, **given}


def started(
    *command: object, cwd: str | None = None, **given: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in that environment; return its exit code and what it printed."""
    words, env = [*map(str, command)], environment(**given)
    return subprocess.run(
        words, capture_output=True, text=True, env=env, cwd=cwd, timeout=120, check=False
    )
