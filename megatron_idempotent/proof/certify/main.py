"""Implements `megatron-idempotent certify`."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from .checks import CHECKS
from .grid import grid
from .layouts import LAYOUTS, WORDS
from .report import as_json, as_junit, as_table
from .run import certify


def main(argv: Sequence[str]) -> int:
    """Certify an adapter and print the verdict.

    Returns:
        The exit code: 0; 1 if a check failed; 2 for an adapter, check or layout that is not there.
    """
    options = _parser().parse_args(argv)
    if options.list:
        for check in CHECKS.values():
            print(f"{check.name:22} {check.summary}")
        print(f'\nLayouts: {", ".join(LAYOUTS)}, or --layout with words joined by "-":')
        for word, text in WORDS.items():
            print(f"{word:22} {text}")
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
            checks=options.check,
            layouts=grid() if options.grid else options.layout,
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
    if options.junit is not None:
        options.junit.write_text(as_junit(options.adapter, results), encoding="utf-8")
    print(as_json(results) if options.json else as_table(results))
    return 1 if any(each.verdict == "failed" for each in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent certify",
        description="Judges a framework's training step against its definition in float64, on CPU "
        "ranks: split steps, aborts, failures, NaN, restarts, in several layouts. Exit code 1 "
        "where a check failed.",
    )
    parser.add_argument(
        "adapter",
        nargs="?",
        metavar="PACKAGE.MODULE:CLASS",
        help="an adapter, such as megatron_idempotent.proof.certify.adapters:SplitStep",
    )
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="only this one; repeatable"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--layout",
        action="append",
        metavar="NAME",
        help="only this one, of the words that --list has, such as dp2-tp2-distopt; repeatable",
    )
    where.add_argument(
        "--grid",
        action="store_true",
        help="layouts that have all pairs of words, instead of the usual ones",
    )
    parser.add_argument("--stock", action="store_true", help="without this library's patches")
    parser.add_argument(
        "--declared", action="store_true", help="also run what the adapter says that it cannot do"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="draw sizes and places of failures from this number, which the report of a run prints",
    )
    parser.add_argument(
        "--thorough", action="store_true", help="more draws, in several times the time"
    )
    parser.add_argument("--list", action="store_true", help="print checks and layouts, run nothing")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write JUnit's XML")
    return parser
