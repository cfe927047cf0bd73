"""Implements `megatron-idempotent certify`: a verdict as a table, or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.record import Hazard
from megatron_idempotent.patching.table import render, terminal_width, wrapped

from .checks import CHECKS
from .layouts import GRID, KINDS, LAYOUTS, WORDS, layout
from .run import Result, certify
from .state_checks import EVERY, STATE_CHECKS


def main(argv: Sequence[str]) -> int:
    """Run the command `certify`: judge an adapter's training step by checks, and print the results.

    Returns:
        The exit code: 0; 1 if a check failed; 2 for an unknown adapter, check or layout, and if
        nothing could be judged.
    """
    options = parser().parse_args(argv)
    if options.list:
        layouts = f'Layouts: {", ".join(LAYOUTS)}, or --layout with words joined by "-":'
        print(render((), [(check.name, check.summary) for check in EVERY.values()]))
        print("", *wrapped(layouts, terminal_width()), sep="\n")
        print(render((), [*WORDS.items()]))
        return 0
    if options.adapter is None:
        print("megatron-idempotent certify: name an adapter, PACKAGE.MODULE:CLASS", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:  # as `python -m` does, for an adapter in this folder
        sys.path.insert(0, os.getcwd())
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    results = []
    try:
        for result in certify(
            options.adapter,
            checks=options.check or ([*STATE_CHECKS] if options.state else None),
            layouts=GRID if options.grid else options.layout,
            stock=options.stock,
            declared=options.declared,
            seed=seed,
            thorough=options.thorough,
        ):
            results.append(result)
            if sys.stderr.isatty():
                print(f"\r{result.layout} {result.check:<30}", end="", file=sys.stderr)
    except ValueError as error:
        print(f"megatron-idempotent certify: {error}", file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    print(as_json(results) if options.json else as_table(results))
    if not any(result.verdict in _MARKS for result in results):
        causes = ", ".join(sorted({f"{result.layout}: {result.fault}" for result in results}))
        print(f"megatron-idempotent certify: nothing was judged ({causes})", file=sys.stderr)
        return 2
    return 1 if any(result.verdict == "failed" for result in results) else 0


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `megatron-idempotent certify`."""
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent certify",
        description="Judges a framework's training step against its definition in float64, on CPU "
        "ranks: split steps, aborts, failures, NaN, restarts, in several layouts. Exit code 0; "
        "1 where a check failed; 2 for an adapter, check or layout that is not there.",
    )
    parser.add_argument(
        "adapter",
        nargs="?",
        metavar="PACKAGE.MODULE:CLASS",
        help="an adapter, such as megatron_idempotent.proof.certify.adapters:SplitStep",
    )
    parser.add_argument(
        "--check", action="append", metavar="CHECK", help="only this one; repeatable"
    )
    for name, purpose in (
        (
            "--state",
            "checks of saves, loads, rollbacks and offloads, in place of those of the step",
        ),
        ("--stock", "without this library's patches"),
        ("--declared", "also run what the adapter says that it cannot do"),
        ("--thorough", "more draws, in several times the time"),
        ("--list", "print checks and layouts, run nothing"),
        ("--json", "print the results as JSON"),
    ):
        parser.add_argument(name, action="store_true", help=purpose)
    layouts = parser.add_mutually_exclusive_group()
    layouts.add_argument(
        "--layout",
        action="append",
        metavar="LAYOUT",
        help="only this one, of the words that --list has, such as dp2-tp2-distopt; repeatable",
    )
    layouts.add_argument(
        "--grid",
        action="store_true",
        help="layouts that have all pairs of words, instead of the usual ones",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="draw sizes and places of failures from this number, which the report of a run prints",
    )
    return parser


_MARKS = {"passed": "ok", "failed": "FAILED", "declared": "declared"}


def as_table(results: Sequence[Result]) -> str:
    """Format results as a table of checks by layouts, a line for each fault, and the totals. The
    columns are the checks or the layouts, whichever are fewer.
    """
    layouts = list(dict.fromkeys(row.layout for row in results))
    marks = {(row.check, row.layout): _MARKS.get(row.verdict, "-") for row in results}
    checks = [name for name in EVERY if any(row.check == name for row in results)]
    if len(layouts) > len(checks):
        parts = {
            name: max(row.of_bound for row in results if row.layout == name) for name in layouts
        }
        header: tuple[str, ...] = ("layout", *checks, "largest part of a bound")
        rows = [
            (name, *(marks.get((check, name), "") for check in checks), f"{parts[name]:.2g}")
            for name in layouts
        ]
    else:
        header = ("check", *layouts, "it demands that")
        rows = [
            (check, *(marks.get((check, name), "") for name in layouts), EVERY[check].summary)
            for check in checks
        ]
    lines = [render(header, rows)]
    for row in results:
        if row.verdict in ("failed", "declared"):
            lines.append(f"{row.layout}, {row.check}, {row.verdict}: {row.fault}")
            names = suspects(row) if row.verdict == "failed" else []
            if names:
                commands = " or ".join(f"`megatron-idempotent explain {name}`" for name in names)
                lines.append(f"    It may be a known hazard: {commands}.")
    unseen = words_unseen(results)
    if unseen:
        lines.append(
            f"No layout had {', '.join(unseen)}: what is wrong there alone was not seen. --layout "
            "names layouts of these words, and --grid has all of them."
        )
    lines.append(summary(results))
    return "\n".join(lines)


def words_unseen(results: Sequence[Result]) -> list[str]:
    """Return the words of layout names, such as "tp", that occur in no layout on which a step was
    judged.
    """
    judged = [
        layout(result.layout)
        for result in results
        if result.check in CHECKS and result.verdict in ("passed", "failed")
    ]
    seen_words = {word for layout in judged for word in (*layout.words, *layout.flags)}
    # FSDP2 does not go with most words, and no other layout has it.
    excluded = {*KINDS} - {"dp", "fsdp2", "sequences"} if "fsdp2" in seen_words else {"fsdp2"}
    return [word for word in KINDS if judged and word not in seen_words | excluded]


def suspects(result: Result) -> list[str]:
    """Return the ids of the hazards, known defects of Megatron, that may have caused a failed
    result.

    For an exception they are the hazards whose reproduction raises it on stock. A wrong number does
    not tell its cause: then they are the check's silent hazards.
    """
    by_id = hazards()
    raised = _RAISED.search(result.fault)
    if raised is None:
        words = layout(result.layout).flags
        return [
            name
            for name in EVERY[result.check].hazards
            if re.match(rf"{_OURS}:|[^:]*$", by_id[name].stock_error)
            and (name not in _ONLY or words & _ONLY[name])
        ]
    error = f"{raised['kind']}: {raised['message']}"
    matching = [name for name, hazard in by_id.items() if hazard.raises(error)]
    # A framework's copy of Megatron's loop raises the same text; its own hazard comes first.
    path = f"/{raised['file']}"
    packages = {name: _package(by_id[name]) for name in matching}
    of_file = [name for name, package in packages.items() if f"/{package}/" in path]
    nearer = [name for name in of_file if packages[name] != _MEGATRON]
    return nearer or [name for name, package in packages.items() if package == _MEGATRON]


_RAISED = re.compile(r"(?P<kind>\w+) in (?P<file>\S.*?):\d+ \(\S+\): ?(?P<message>.*)")
#: The exception that reproductions raise for a wrong number; no framework raises it.
_OURS = "Fault"
_MEGATRON = "megatron"
_PACKAGES = {"megatron_core": _MEGATRON, "megatron_bridge": "megatron/bridge", "ms_swift": "swift"}
#: Hazards that exist only in layouts with one of these words.
_ONLY = {"grad-scale-func": frozenset({"fp16", "moe", "mtp"})}


def _package(hazard: Hazard) -> str:
    name = hazard.distribution.replace("-", "_")
    return _PACKAGES.get(name, name)


def summary(results: Sequence[Result]) -> str:
    """Return one line with the numbers of passed, failed, declared and skipped checks."""
    number = {word: sum(row.verdict == word for row in results) for word in _MARKS}
    skipped = len(results) - sum(number.values())
    seconds = sum(row.seconds for row in results)
    return (
        f"{number['passed']} passed, {number['failed']} failed, {number['declared']} declared, "
        f"{skipped} not made, in {seconds:.0f} s"
        + "".join(f"; --seed {seed} draws the same" for seed in {row.seed for row in results})
    )


def as_json(results: Sequence[Result]) -> str:
    """Return the results as a JSON list of objects with the fields of `Result`."""
    return json.dumps([asdict(row) for row in results], indent=2)
