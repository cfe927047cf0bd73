"""Implements `hook`, which applies the patches in programs without editing them."""

from __future__ import annotations

import argparse
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.hook import PACKAGES
from megatron_idempotent.patching.settings import OFF, SWITCH

PTH = "zz_megatron_idempotent.pth"
_WATCH = f"""\
class MegatronIdempotentHook:
 waits = True
 def find_spec(self, name, path=None, target=None):
  if self.waits and name in {sorted(PACKAGES)}:
   self.waits = False
   try: import importlib.util, megatron_idempotent.auto
   except ImportError as e: print("megatron-idempotent: no patches by {PTH}:", e, file=sys.stderr)
   else: return importlib.util.find_spec(name)
if "MegatronIdempotentHook" not in [type(each).__name__ for each in sys.meta_path]:
 sys.meta_path.insert(0, MegatronIdempotentHook())
"""
PTH_LINE = (
    f'import os, sys; os.environ.get("{SWITCH}", "").strip().lower() not in {("", *sorted(OFF))} '
    f'and exec({_WATCH!r}, {{"sys": sys}})\n'
)
"""The line of the hook's `.pth` file, which Python runs at each start.

It reads one environment variable; unless that is off, it adds a finder to `sys.meta_path`. The
finder's code is in the line, because Python reads `.pth` files before `sys.path` is complete: those
of the user's folder come before those of the environment, which may have this package. In a venv
Python reads them twice.
"""


def hook(argv: Sequence[str]) -> int:
    """Install, show or remove the hook: a `.pth` file that lets Python apply the patches in
    programs which do not call `apply()`.

    Returns:
        The exit code: 1 if `status` finds no hook, or one of another version; 2 if the folder
        cannot be written; else 0.
    """
    arguments = hook_parser().parse_args(argv)
    file: Path = arguments.into / PTH
    try:
        if arguments.action == "install":
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(PTH_LINE, encoding="utf-8")
            part.chmod(0o644)  # readable for other users, even under a strict umask
            part.replace(file)  # so that a Python that starts now does not read a part of it
        was_there = file.exists()
        if arguments.action == "remove":
            file.unlink(missing_ok=True)
            print(f"{file} is removed" if was_there else f"nothing to remove: no {file}")
            return 0
        text = file.read_text(encoding="utf-8") if was_there else None
    except OSError as error:
        print(
            f"megatron-idempotent hook: {error.filename}: {error.strerror}; give a folder that you "
            "may write with --into",
            file=sys.stderr,
        )
        return 2
    print(hook_line(file, text))
    return int(text != PTH_LINE)


def hook_parser() -> argparse.ArgumentParser:
    """Return the argument parser of the command `megatron-idempotent hook`."""
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
    """Return a line that says whether the hook file works in this environment.
    Return None if there is no hook and `MEGATRON_IDEMPOTENT` is not on.
    """
    user, environment = Path(site.getusersitepackages()), Path(sysconfig.get_path("purelib"))
    folders = dict.fromkeys([environment, *map(Path, site.getsitepackages()), user])
    files = [folder / PTH for folder in folders if (folder / PTH).exists()]
    is_on = os.environ.get(SWITCH, "").strip().lower() not in ("", *OFF)
    if not files and not is_on:
        return None
    if sys.flags.no_site:
        return "this Python was started with -S, with which it reads no hook"
    read = [file for file in files if file.parent != user or site.ENABLE_USER_SITE]
    if files and not read:
        return f"{files[0]} is not read here: with -I or -s, and in a venv, Python passes it over"
    lines = [hook_line(file, file.read_text("utf-8")) for file in read]
    return "; ".join(lines or [hook_line(environment / PTH, None)])


def hook_line(file: Path, text: str | None) -> str:
    """Return a line about the state of the hook's file: missing, of another version, or in place.
    `text` is the file's content, None if there is no file.
    """
    if text is None:
        return f"no hook in {file.parent}: `megatron-idempotent hook install` writes it"
    if text != PTH_LINE:
        return f"{file} is of another version: run `megatron-idempotent hook install` again"
    value = os.environ.get(SWITCH)
    state = f"here it is {value}" if value is not None else "here it is unset"
    return f"{file} is in place: a Python that reads it and has {SWITCH}=1 applies patches; {state}"


_HOOK = (
    "A line in a .pth file, which Python runs at each start. Without "
    f"{SWITCH}=1 it does nothing; with it, the first import of Megatron or of a framework applies "
    "all patches, also in Ray workers and other processes that inherit the variable. `pip install` "
    "never writes it, `remove` deletes it, and `python -S` does not read it. Exit code 0; 1 if "
    "`status` finds none, or one of another version; 2 if the folder cannot be written."
)
