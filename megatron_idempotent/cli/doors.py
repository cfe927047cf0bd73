"""Implements `hook` and `run`, which bring the patches into programs that nobody edits."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shlex
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import megatron_idempotent
from megatron_idempotent.hook import PACKAGES
from megatron_idempotent.patching.rows import COVERED, PROBLEMS
from megatron_idempotent.patching.settings import OFF, SWITCH, switch

HOOK = "zz_megatron_idempotent.pth"
_WATCH = f"""\
class MegatronIdempotentHook:
 waits = True
 def find_spec(self, name, path=None, target=None):
  if self.waits and name in {sorted(PACKAGES)}:
   self.waits = False
   try: import importlib.util, megatron_idempotent.auto
   except ImportError as e: print("megatron-idempotent: no patches by {HOOK}:", e, file=sys.stderr)
   else: return importlib.util.find_spec(name)
if "MegatronIdempotentHook" not in [type(each).__name__ for each in sys.meta_path]:
 sys.meta_path.insert(0, MegatronIdempotentHook())
"""
LINE = (
    f'import os, sys; os.environ.get("{SWITCH}", "").strip().lower() not in {("", *sorted(OFF))} '
    f'and exec({_WATCH!r}, {{"sys": sys}})\n'
)
"""Python runs it at each start: it looks at one variable, and unless that is off a finder waits.

The line itself has the finder, because `.pth` files are read while the path is incomplete: those of
the user's folder before those of the environment, where this package may be. In a venv Python reads
them twice.
"""

_PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FROM_TERMINAL = 0x80  # SI_KERNEL: the terminal has told the command, too
_STARTUP = str(Path(megatron_idempotent.__file__).parent / "startup")


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
            part.chmod(0o644)  # other users' Pythons read it, also under a strict umask
            part.replace(file)  # a Python that starts meanwhile reads no half of it
        was_there = file.exists()
        if arguments.action == "remove":
            file.unlink(missing_ok=True)
            print(f"{file} is removed" if was_there else f"nothing to remove: no {file}")
            return 0
        found = file.read_text(encoding="utf-8") if was_there else None
    except OSError as error:
        print(
            f"megatron-idempotent hook: {error.filename}: {error.strerror}; give a folder that you "
            "may write with --into, or start the program with `megatron-idempotent run`",
            file=sys.stderr,
        )
        return 2
    print(hook_line(file, found))
    return int(found != LINE)


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
    """Say in a line what the hook does in this environment; None where nobody asks for it."""
    user, own = Path(site.getusersitepackages()), Path(sysconfig.get_path("purelib"))
    folders = dict.fromkeys([own, *map(Path, site.getsitepackages()), user])
    files = [folder / HOOK for folder in folders if (folder / HOOK).exists()]
    asked = os.environ.get(SWITCH, "").strip().lower() not in ("", *OFF)
    below_run = _STARTUP in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not files and not asked:
        return None
    if sys.flags.no_site:
        return "this Python was started with -S, which reads neither a hook nor what `run` sets"
    if below_run and not sys.flags.ignore_environment:
        return "`megatron-idempotent run` applies patches here"
    read = [file for file in files if file.parent != user or site.ENABLE_USER_SITE]
    if files and not read:
        return f"{files[0]} is not read here: with -I or -s, and in a venv, Python passes it over"
    lines = [hook_line(file, file.read_text("utf-8")) for file in read]
    if below_run:
        lines.append("-E and -I keep `megatron-idempotent run` out of this Python")
    return "; ".join(lines or [hook_line(own / HOOK, None)])


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

    Below another `run` of this machine, that one counts. `MEGATRON_IDEMPOTENT=0` starts the command
    without patches.

    Returns:
        The command's exit code; 128 + n if signal n ended it; 127 if there is no such command, 126
        if it cannot be executed, 2 if none is given or the variable has no meaning.
    """
    given = run_parser().parse_args(argv).command
    command: list[str] = given[1:] if given[:1] == ["--"] else given
    try:
        wanted = switch(os.environ, SWITCH, default=True)
    except ValueError as error:
        return _refused(2, str(error))
    if not command:
        return _refused(2, "no command; write megatron-idempotent run -- torchrun …")
    reports = outer = os.environ.get(f"{SWITCH}_RUN", "")
    said = ""
    with contextlib.ExitStack() as stack:
        if not wanted:
            said = f"{SWITCH}={os.environ[SWITCH]}, so no patch is in place"
        elif not os.path.isdir(outer):
            try:
                # Processes that outlive the command may still write into it.
                made = tempfile.TemporaryDirectory(
                    prefix="megatron-idempotent-", ignore_cleanup_errors=True
                )
                reports = stack.enter_context(made)
            except OSError as error:
                reports, said = "", f"patches are not counted ({error}): set TMPDIR to a folder"
        try:
            given = run_environment(reports) if wanted else {}
            code = _supervise(command, {**os.environ, **given})
        except OSError as error:
            return _not_started(command[0], error)
        if reports != outer:
            said = said or _summary(Path(reports))
        if said:
            with contextlib.suppress(OSError):  # the reader of standard error has gone
                print(f"megatron-idempotent: {said}", file=sys.stderr)
    return code


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of `run`."""
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent run", usage="%(prog)s [-h] -- COMMAND ...", description=_RUN
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, as in a shell"
    )
    return parser


def _refused(code: int, said: str) -> int:
    print(f"megatron-idempotent run: {said}", file=sys.stderr)
    return code


def run_environment(reports: str) -> Mapping[str, str]:
    """Return the variables that `run` sets: Python's start applies patches and tells of them."""
    given = os.environ.get("PYTHONPATH")
    before = given.split(os.pathsep) if given else []
    path = [_STARTUP, *(each for each in before if each != _STARTUP)]
    return {SWITCH: "1", f"{SWITCH}_RUN": reports, "PYTHONPATH": os.pathsep.join(path)}


def _supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end, pass signals on, and return its exit code as a shell does.

    Raises:
        OSError: the command cannot be started.
    """
    watched = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    # A parent that ignores it, as some daemons do, would have the kernel forget the exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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


def _not_started(name: str, error: OSError) -> int:
    if error.errno == errno.ENOEXEC:
        return _refused(126, f"{name} has no first line #!…: write its interpreter before it")
    if error.errno != errno.ENOENT:
        return _refused(126, f"{name} cannot be executed: {error.strerror}")
    if not os.path.exists(name):
        where = "no file" if "/" in name else "not on the PATH:"
        return _refused(127, f"{where} {name}; write megatron-idempotent run -- torchrun …")
    why = "its first line #! names no program" if "/" in name else "it is not on the PATH"
    return _refused(127, f"{name} is no command, as {why}: write its interpreter before it")


def _summary(folder: Path) -> str:
    """Say in a line how many processes have which patches, by the reports that they left."""
    reports: list[tuple[int | None, list[dict[str, str]]]] = []
    for path in sorted(folder.glob("*.json")):
        name = path.name.partition("-")[0]
        rank = int(name) if name.isdecimal() else None
        reports.append((rank, json.loads(path.read_text("utf-8"))))
    landed = [(rank, rows) for rank, rows in reports if any(r["status"] == "applied" for r in rows)]
    if not landed:
        others = f" ({len(reports)} imported a framework alone)" if reports else ""
        return (
            f"no process on this machine imported Megatron{others}, so no patch is in place (one "
            "that is given a PYTHONPATH of its own needs `megatron-idempotent hook install`)"
        )
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
