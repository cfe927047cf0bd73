"""Implements `hook` and `run`, which bring the patches into programs that nobody edits."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import megatron_idempotent
from megatron_idempotent.patching.report import COVERED, PROBLEMS
from megatron_idempotent.patching.settings import SWITCH

# After an editable install's own file, which puts this package on the path: names come in order.
HOOK = "zz_megatron_idempotent.pth"
LINE = (
    f'import os; os.environ.get("{SWITCH}", "").lower() in ("1", "true", "on", "yes") '
    'and __import__("megatron_idempotent.auto")\n'
)
"""Python runs it at each start: it looks at one variable, and imports only if that is on."""

_PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FROM_TERMINAL = 0x80  # SI_KERNEL: the terminal has told the command, too


def hook(argv: Sequence[str]) -> int:
    """Install, show or remove the line that applies the patches wherever a variable is on.

    Returns:
        The exit code: 1 if the line is missing or another one (`status`), 2 if the folder cannot be
        written, else 0.
    """
    arguments = hook_parser().parse_args(argv)
    file: Path = arguments.into / HOOK
    try:
        if arguments.action == "install":
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(LINE, encoding="utf-8")
            part.replace(file)  # a Python that starts meanwhile reads no half of it
        elif arguments.action == "remove":
            file.unlink(missing_ok=True)
        found = file.read_text(encoding="utf-8") if file.exists() else None
    except OSError as error:
        print(
            f"megatron-idempotent hook: {error.filename}: {error.strerror}; give a folder that you "
            "may write with --into, or start the program with `megatron-idempotent run`",
            file=sys.stderr,
        )
        return 2
    print(hook_line(file, found))
    return int(arguments.action != "remove" and found != LINE)


def hook_parser() -> argparse.ArgumentParser:
    """Return the parser of `hook`."""
    parser = argparse.ArgumentParser(prog="megatron-idempotent hook", description=_HOOK)
    parser.add_argument("action", choices=("install", "status", "remove"))
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        default=Path(sysconfig.get_path("purelib")),
        help="a folder whose .pth files Python reads; default: %(default)s",
    )
    return parser


def hook_here() -> str | None:
    """Say in a line what the hook does in this environment; None without hook and variable."""
    file = Path(sysconfig.get_path("purelib")) / HOOK
    if not file.exists() and os.environ.get(SWITCH) is None:
        return None
    return hook_line(file, file.read_text(encoding="utf-8") if file.exists() else None)


def hook_line(file: Path, found: str | None) -> str:
    """Say in a line what the hook's file does here; `found` is its text, or None without one."""
    if found is None:
        return f"no hook in {file.parent}: `megatron-idempotent hook install` writes it"
    if found != LINE:
        return f"{file} is of another version: run `megatron-idempotent hook install` again"
    value = os.environ.get(SWITCH)
    state = f"here it is {value}" if value is not None else "here it is unset"
    return f"{file} is in place: a Python that reads it and has {SWITCH}=1 applies patches; {state}"


def run(argv: Sequence[str]) -> int:
    """Run a command with the patches in each Python process below it that imports Megatron.

    Signals are passed on. When the command has ended, one line on standard error says in which
    processes patches are in place.

    Returns:
        The command's exit code; 128 + n if signal n ended it; 2 if there is no such command.
    """
    given = run_parser().parse_args(argv).command
    command: list[str] = given[1:] if given[:1] == ["--"] else given
    if not command or shutil.which(command[0]) is None:
        what = f"no command {command[0]!r} on the PATH" if command else "no command"
        print(
            f"megatron-idempotent run: {what}; write megatron-idempotent run -- torchrun …",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="megatron-idempotent-") as reports:
        code = _supervise(command, _environment(reports))
        print(f"megatron-idempotent: {_summary(_read(Path(reports)))}", file=sys.stderr)
    return code


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of `run`."""
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent run",
        usage="%(prog)s [-h] -- COMMAND ...",
        description=_RUN,
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, as in a shell"
    )
    return parser


def _environment(reports: str) -> Mapping[str, str]:
    """Return the environment of the command: Python's start applies patches and tells of them."""
    path = [str(Path(megatron_idempotent.__file__).parent / "startup")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        SWITCH: "1",
        f"{SWITCH}_RUN": reports,
        "PYTHONPATH": os.pathsep.join(path),
    }


def _supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end, pass signals on, and return its exit code as a shell does."""
    watched = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        while process.poll() is None:
            told = signal.sigwaitinfo(watched)
            if told.si_signo != signal.SIGCHLD and told.si_code != _FROM_TERMINAL:
                process.send_signal(told.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code: int = process.returncode
    return code if code >= 0 else 128 - code


def _read(folder: Path) -> list[tuple[int | None, list[dict[str, str]]]]:
    """Return the rank and the rows of each process that imported Megatron or a framework."""
    found = []
    for path in sorted(folder.glob("*.json")):
        rank = path.name.partition("-")[0]
        found.append((int(rank) if rank.isdecimal() else None, json.loads(path.read_text("utf-8"))))
    return found


def _summary(reports: Sequence[tuple[int | None, Sequence[Mapping[str, str]]]]) -> str:
    """Say in a line how many processes have which patches; `reports` has (rank, rows) of each."""
    landed = [(rank, rows) for rank, rows in reports if any(r["status"] == "applied" for r in rows)]
    if not landed:
        others = f" ({len(reports)} imported a framework alone)" if reports else ""
        return f"no process on this machine imported Megatron{others}, so no patch is in place"
    counts = {sum(row["status"] in COVERED for row in rows) for _, rows in landed}
    ranks = sorted({rank for rank, _ in landed if rank is not None})
    who = f"{len(landed)} process{'es' if len(landed) > 1 else ''}"
    who += f" (rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)})" if ranks else ""
    refused: dict[str, list[int | None]] = {}
    for rank, rows in landed:
        for row in rows:
            if row["status"] in PROBLEMS:
                told = f"{row['id']} ({row['status']}: {row['reason']})"
                refused.setdefault(told, []).append(rank)
    missing = [
        told if len(where) == len(landed) else f"{told} on ranks {', '.join(map(str, where))}"
        for told, where in refused.items()
    ]
    number = " or ".join(map(str, sorted(counts)))
    return f"{number} patches in place in {who}; missing: {'; '.join(missing) or 'none'}"


def _ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers as text: `0-3, 6`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


_HOOK = (
    "A line in a .pth file, which Python runs at each start. Without "
    f"{SWITCH}=1 it does nothing; with it, the first import of Megatron or of a framework applies "
    "all patches, also in Ray workers and other processes that inherit the variable. `pip install` "
    "never writes it. It goes with `remove`; `python -S` does without it. Exit code 0; 1 where "
    "`status` finds none, or one of another version; 2 where the folder cannot be written."
)
_RUN = (
    "Runs a command, such as torchrun, `ray start --block` or a Slurm step, with the patches in "
    "each Python process below it that imports Megatron. Nothing is installed for it. Python's "
    "options -S, -E and -I do without. "
    "The exit code is the command's, or 128 + n if signal n ended it; 2 without a command. "
    f"Example: megatron-idempotent run -- {shlex.join(['torchrun', '--nproc-per-node=8'])} train.py"
)
