"""Subcommands and their arguments."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence

from megatron_idempotent import __version__
from megatron_idempotent.cpu.choice import DEVICES
from megatron_idempotent.cpu.errors import NoDeviceError
from megatron_idempotent.engine.errors import PatchError, UnknownPatchError
from megatron_idempotent.missing import REMEDIES, naming_the_remedy

PROGRAM = "megatron-idempotent"

_OWN_PARSERS = {
    "train": "megatron_idempotent.trainer.main",
    "ping": "megatron_idempotent.controller.ping_command",
    "simulate": "megatron_idempotent.simulator.__main__",
}


READER_LEFT = 128 + signal.SIGPIPE
"""The exit code if the reader of our output has closed it, as `| head` does; shells report the same
for other commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code: 0; 1 where a check failed; 2 where the arguments make no sense; 141 where the
        reader of standard output left, as in `megatron-idempotent doctor --json | head`.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Also where --help leaves by SystemExit: what is buffered would fail at shutdown.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe, such as one to a rank
        # The interpreter flushes once more while it ends, and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT


def _reader_left() -> bool:
    try:
        number = sys.stdout.fileno()
    except OSError:  # standard output has been replaced by something without a descriptor
        return False
    poll = select.poll()
    poll.register(number, 0)  # errors are always reported
    return bool(poll.poll(0))


def _run(argv: list[str]) -> int:
    if argv[:1] and argv[0] in _OWN_PARSERS:
        # They have a parser of their own, so that they can be used without this one.
        try:
            with naming_the_remedy(f"`{PROGRAM} {argv[0]}`"):
                own = importlib.import_module(_OWN_PARSERS[argv[0]])
                code: int = own.main(argv[1:])
                return code
        except ModuleNotFoundError as error:
            if error.name not in REMEDIES:
                raise
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "doctor":
            from .doctor import doctor

            return doctor(as_json=arguments.json)
        if arguments.command == "explain":
            from .explain import explain

            return explain(arguments.id)
        if arguments.command == "drift":
            from .drift import drift

            return drift(arguments.paths, as_json=arguments.json, with_diff=arguments.diff)
        from .explain import as_id
        from .prove import prove

        return prove(
            [as_id(each) for each in arguments.ids] or None,
            as_json=arguments.json,
            device=arguments.device,
        )
    except (UnknownPatchError, PatchError, NoDeviceError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Patches that make Megatron's train path safe to call again."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="what applies to the installed Megatron, and why", description=_DOCTOR
    )
    doctor.add_argument("--json", action="store_true", help="print the rows as JSON")

    explain = commands.add_parser(
        "explain", help="print a hazard's case file, or a list of all hazards"
    )
    explain.add_argument(
        "id", nargs="?", metavar="ID", help="a hazard, also by its file's name; default: list all"
    )

    prove = commands.add_parser(
        "prove", help="run hazards on CPU ranks, stock and patched", description=_PROVE
    )
    prove.add_argument("ids", nargs="*", metavar="ID", help="which hazards; default: all")
    prove.add_argument("--json", action="store_true", help="print the findings as JSON")
    prove.add_argument(
        "--device", choices=DEVICES, help="run on the GPUs of this machine, or on the CPU (default)"
    )

    drift = commands.add_parser(
        "drift",
        help="patches against what is installed, wheels or checkouts",
        description=_DRIFT,
    )
    drift.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a wheel, a folder of wheels, or a source tree; default: the installed Megatron",
    )
    drift.add_argument("--diff", action="store_true", help="show how drifted bodies differ")
    drift.add_argument("--json", action="store_true", help="print the rows as JSON, with diffs")

    commands.add_parser("train", help="the reference RL trainer (see `train --help`)")
    commands.add_parser("ping", help="where an asynchronous run stands (see `ping --help`)")
    commands.add_parser("simulate", help="an asynchronous run on a virtual clock")
    return parser


_DOCTOR = (
    "Decides every patch against the Megatron on the path, without importing it. The first line "
    "answers. Exit code 0; 1 where a patch failed, drifted or is in conflict; 2 where the "
    "environment names an unknown patch. No Megatron at all is 0: the first line says so."
)
_DRIFT = (
    "Reads what each patch wraps in every Megatron or framework given, importing none, and says "
    "whether a person has reviewed it. Exit code 1 where a body drifted."
)
_PROVE = (
    "Runs each hazard's reproduction with the installed Megatron on gloo ranks of this machine, "
    "first stock, then patched. Exit code 1 where a release and its case file disagree."
)
