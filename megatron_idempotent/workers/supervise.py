"""Runs a controller beside torchrun's ranks, and leaves its exit code where they find it.

A rank that starts the controller may be ended and restarted, so it cannot wait for it itself:

    python -m megatron_idempotent.workers.supervise DIRECTORY LIFE -- COMMAND…
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .handover import EXIT_FILE, HOST, LIFE, write_private

#: What torchrun tells its ranks, and a controller is none.
_OF_RANKS = frozenset(
    f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


def start(
    directory: Path, life: str, command: Sequence[str], *, host: str = ""
) -> subprocess.Popen[bytes]:
    """Start a controller as a process that outlives this rank and its torchrun.

    It has this process's environment but for what makes a rank of it, and its output.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }
    environ[LIFE] = life
    if host:
        environ[HOST] = host
    program = [sys.executable, "-m", __name__, str(directory), life, "--", *command]
    # Its own session: what ends the ranks, such as Ctrl-C, is not the controller's end.
    return subprocess.Popen(program, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)


def main(argv: Sequence[str]) -> int:
    """Run the command to its end; its exit code, with 128 + N for signal N."""
    directory, life, dashes, *command = argv
    if dashes != "--" or not command:
        raise ValueError(f"arguments {list(argv)!r}: DIRECTORY LIFE -- COMMAND…")
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"the controller cannot be started: {error}\n")
        code = 127
    else:
        code = _wait(child)
    code = 128 - code if code < 0 else code
    write_private(Path(directory) / EXIT_FILE, {"life": life, "code": code})
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    def hand_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
