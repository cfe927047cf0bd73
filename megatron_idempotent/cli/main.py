"""Implements the command `megatron-idempotent`: it parses arguments, and calls the subcommands."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_idempotent import __version__
from megatron_idempotent.lazy import REMEDIES, naming_the_remedy
from megatron_idempotent.patching.base import PatchError, UnknownPatchError
from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.settings import SWITCH, did_you_mean
from megatron_idempotent.patching.table import render
from megatron_idempotent.proof.cpu.errors import NoDeviceError
from megatron_idempotent.proof.cpu.gpu import DEVICES
from megatron_idempotent.proof.prove import Finding
from megatron_idempotent.proof.prove import prove as findings_of

from .explain import as_id, explain

PROGRAM = "megatron-idempotent"

_OWN_PARSERS = {
    "certify": ("megatron_idempotent.proof.certify.main", "main", "parser"),
    "hook": ("megatron_idempotent.cli.hook", "hook", "hook_parser"),
    "train": ("megatron_idempotent.rl.trainer.main", "main", "parser"),
}
"""Maps a command with a parser of its own to (module, function, function that makes the parser)."""

_REMOVED = {
    "run": f" `{PROGRAM} hook install`, once in each environment that trains, and "
    f"{SWITCH}=1 before the command bring the patches into all processes below it"
}
"""Maps a command of earlier versions to a sentence about its replacement."""

NOTHING_PROVEN = 3
"""The exit code of `prove` if the installed packages have none of the hazards."""

READER_LEFT = 128 + signal.SIGPIPE
"""The exit code if standard output is a pipe that its reader has closed, as `| head` does. Shells
report it for other commands, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process.

    Returns:
        The exit code: 1 if a check failed; 2 for wrong arguments or a missing package; 3 if `prove`
        saw no hazard; 141 if the reader of standard output has closed it, as in
        `megatron-idempotent doctor --json | head`; else 0. `train` has more.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        except ModuleNotFoundError as error:
            if error.name not in REMEDIES:
                raise
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2
        finally:
            # Also if --help raised SystemExit: flushing buffered output would fail at shutdown.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe, such as one to a rank
        # The interpreter flushes again at its end, and would print a traceback.
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
        # Imported at the call, because each module needs packages that other commands do not.
        module, function, _ = _OWN_PARSERS[argv[0]]
        with naming_the_remedy(f"`{PROGRAM} {argv[0]}`"):
            code: int = getattr(importlib.import_module(module), function)(argv[1:])
            return code
    parser, commands = _parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        hint = _REMOVED.get(argv[0]) or did_you_mean(argv[0], commands.choices)
        parser.error(f"there is no command {argv[0]!r}.{hint}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # argparse itself would show the usage without the command's options
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if arguments.command == "doctor":
            from .doctor import doctor

            return doctor(as_json=arguments.json, neighbour=arguments.beside)
        if arguments.command == "explain":
            return explain(" ".join(arguments.text), upstream=arguments.upstream)
        if arguments.command == "completion":
            from .completion import completion

            commands.choices.update(_own_parsers())
            return completion(arguments.shell, parser)
        if arguments.command == "drift":
            from .drift import drift

            accepted = arguments.accept
            return drift(
                arguments.paths,
                as_json=arguments.json,
                with_diff=arguments.diff,
                accepted=None if accepted is None else [as_id(name) for name in accepted],
                label=arguments.label,
            )
        return prove(
            [as_id(name) for name in arguments.ids] or None,
            as_json=arguments.json,
            device=arguments.device,
        )
    except (UnknownPatchError, PatchError, NoDeviceError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def _own_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return command → argument parser, for the commands in `_OWN_PARSERS`.
    Commands whose packages are not installed are left out.
    """
    parsers = {}
    for command, (module, _, make) in _OWN_PARSERS.items():
        try:
            parsers[command] = getattr(importlib.import_module(module), make)()
        except ModuleNotFoundError as error:
            if error.name not in REMEDIES:
                raise
    return parsers


def _parsers() -> tuple[argparse.ArgumentParser, Any]:
    """Return the program's argument parser, and the argparse action with its subcommands."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Patches that make Megatron's train path safe to call again.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="what applies to the installed Megatron, and why", description=_DOCTOR
    )
    doctor.add_argument("--json", action="store_true", help="print the rows as JSON")
    doctor.add_argument(
        "--beside",
        metavar="MODULE[:FUNCTION]",
        help="apply, then import this module and call the function, which patch Megatron, too; "
        "say which functions both patch",
    )

    explain = commands.add_parser(
        "explain", help="print a hazard's case file, or a list of all hazards", description=_EXPLAIN
    )
    explain.add_argument(
        "text",
        nargs="*",
        metavar="ID",
        help="a hazard, also by its file's name, or the words of a message; default: list all",
    )
    explain.add_argument(
        "--upstream",
        action="store_true",
        help="print the repair of upstream's own code: the pull request's message and the edits",
    )

    prove = commands.add_parser(
        "prove", help="run hazards on CPU ranks, stock and patched", description=_PROVE
    )
    prove.add_argument("ids", nargs="*", metavar="ID", help="which hazards; default: all")
    prove.add_argument("--json", action="store_true", help="print the findings as JSON")
    prove.add_argument(
        "--device",
        choices=DEVICES,
        help="the CPU (default), this machine's GPUs, or a CPU that refuses what a GPU would",
    )

    drift = commands.add_parser(
        "drift", help="patches against what is installed, wheels or checkouts", description=_DRIFT
    )
    drift.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a wheel, a folder of wheels, a source tree, or CLONE@COMMIT; default: the installed "
        "Megatron",
    )
    drift.add_argument("--diff", action="store_true", help="show how drifted bodies differ")
    drift.add_argument("--json", action="store_true", help="print the rows as JSON, with diffs")
    drift.add_argument(
        "--accept",
        nargs="*",
        metavar="ID",
        help="write down that a person has read what is new for these patches, in a checkout of "
        "this project; without an ID, extend the labels of unchanged bodies to the release",
    )
    drift.add_argument(
        "--as", dest="label", metavar="LABEL", help="with --accept: the name of a commit"
    )

    completion = commands.add_parser(
        "completion", help="complete commands and ids in a shell", description=_COMPLETION
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    commands.add_parser("certify", help="a framework's training step against its definition")
    commands.add_parser("hook", help="patches wherever a variable is on: install, status, remove")
    commands.add_parser("train", help="the reference RL trainer")
    return parser, commands


_EXIT_CODES = (
    "COMMAND --help lists its options. Exit codes: 0; 1 if somebody has to look; 2 for wrong "
    "arguments or a missing package; 141 if the reader of the output left. "
    "`train` has others too."
)
_COMPLETION = (
    "On a terminal, prints the line that installs completion for new shells; into a pipe or a "
    'file, the script. For this shell alone: eval "$(megatron-idempotent completion bash)"; '
    "in fish: megatron-idempotent completion fish | source. Exit code 0."
)
_EXPLAIN = (
    "Prints a hazard's case file: symptom, cause, releases, who met it in public, when the patch "
    "may go, and on which releases and commits it was seen. For words of a message or symptom, "
    "lists the hazards whose case files resemble them most. --upstream prints the repair of "
    "Megatron itself. Exit code 0; 2 for an unknown id, or if no case file resembles the words."
)
_DOCTOR = (
    "Decides every patch against the Megatron on the path, without importing it. The first line "
    "sums up. Exit code 0; 1 if a patch failed, drifted or is in conflict; 2 if the "
    "environment names an unknown patch. Without a Megatron it is 0, and the first line says so."
)
_DRIFT = (
    "Reads what each patch wraps in each Megatron or framework at the paths, importing none, and "
    "says if a person has reviewed it. Exit code 0; 1 if a body drifted; 2 for an unknown path "
    "or id."
)
_PROVE = (
    "Runs each hazard's reproduction with the installed Megatron on gloo ranks of this machine, "
    "first stock, then patched. Exit code 0; 1 if a release and its case file disagree; 2 for "
    "an unknown id or a missing GPU; 3 if nothing was proven, because what is installed has none "
    "of the hazards."
)


def prove(ids: Sequence[str] | None, *, as_json: bool, device: str | None) -> int:
    """Run the programs of hazards, stock and patched, and print a table of verdicts, or JSON. With
    `ids` None it runs all hazards.

    Returns:
        The exit code: 1 if a verdict contradicts a case file, 3 if no hazard was reproduced, else
        0.

    Raises:
        UnknownPatchError: no case file has one of the ids.
        NoDeviceError: there is no GPU, and the device is "cuda".
    """
    total = len(hazards() if ids is None else set(ids))
    findings: list[Finding] = []
    for finding in findings_of(ids, device=device):
        findings.append(finding)
        if not as_json and sys.stderr.isatty():
            print(f"\r{len(findings)}/{total} {finding.id:<40}", end="", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        if sys.stderr.isatty():
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
        rows = [
            (f.id, f.verdict, f"{f.seconds:.1f}", f.patched[:40], f.stock.split("\n")[0])
            for f in findings
        ]
        print(render(("hazard", "verdict", "seconds", "patched", "stock"), rows))
        for finding in findings:
            if finding.failed and finding.control not in ("-", "ok"):
                print(f"\n{finding.id}, the correct program beside it: {finding.control}")
    if any(finding.failed for finding in findings):
        return 1
    if all(finding.verdict == "not_applicable" for finding in findings):
        print(
            f"{PROGRAM} prove: nothing was proven: what is installed has none of these hazards",
            file=sys.stderr,
        )
        return NOTHING_PROVEN
    return 0
