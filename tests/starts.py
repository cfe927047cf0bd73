"""Starts programs without the variables of this package, and runs files, for tests of any room."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import struct
import subprocess
import sys
import sysconfig
import termios
import venv
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
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


def loaded(path: Path) -> ModuleType:
    """Run a file that is in no package; return its module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**given: object) -> dict[str, str]:
    """Return this process's environment without this package's variables, and with `given`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_IDEMPOTENT")}
    return {**kept, **{name: str(value) for name, value in given.items()}}


def started(
    *command: object, cwd: object = None, timeout_s: float = 120, **given: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in that environment; return its exit code and what it printed."""
    how = {"env": environment(**given), "cwd": cwd, "timeout": timeout_s, "check": False}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **how)


def hooked_python(folder: Path) -> Path:
    """Make an environment with the hook and all that is installed here; return its Python."""
    from megatron_idempotent.cli.main import main

    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = sysconfig.get_path("purelib")
    (packages / "a_parent.pth").write_text(f"import site; site.addsitedir({installed!r})\n")
    assert main(["hook", "install", "--into", str(packages)]) == 0
    return folder / "bin" / "python"


def shown_at_80_columns(*command: str) -> list[str]:
    """The lines that a Python program prints on a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen([sys.executable, *command], stdout=follower, env=environ)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 1 << 16):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0
    return shown.decode().splitlines()
