"""Simulates the controller from the command line, and prints a table of what it found.

python -m megatron_idempotent.rl.simulator scenario.toml [--set key=value] [--sweep key=a,b]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.patching.settings import did_you_mean

SHIPPED = Path(__file__).with_name("scenarios")


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate each asked scenario, and print the results; return the exit status.

    It is 0, or 2 for a scenario that cannot be read or a package that is missing.
    """
    asked = parser().parse_args(arguments)
    path = Path(asked.scenario)
    if not path.suffix:
        path = SHIPPED / f"{asked.scenario}.toml"
        if not path.exists():
            print(
                f"error: no scenario {asked.scenario!r}: give a TOML file, or one of "
                f"{', '.join(shipped())}.{did_you_mean(asked.scenario, shipped())}",
                file=sys.stderr,
            )
            return 2
    try:
        # Here and not above: `--help` needs nothing that is not installed with the package.
        from .run import print_table, simulate
        from .scenario import load_scenario

        runs = [
            (" ".join(chosen) or path.stem, load_scenario(path, [*asked.set, *chosen]))
            for chosen in _combinations(asked.sweep)
        ]
    except (ModuleNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = []
    for label, scenario in runs:
        if len(runs) > 1 and sys.stderr.isatty():
            print(f"simulating {label} …", file=sys.stderr)
        found.append((label, simulate(scenario)))
    if asked.json:
        print(json.dumps({label: report.summary() for label, report in found}))
    else:
        print_table(found)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of `simulate`."""
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent simulate",
        description="Runs the asynchronous controller on a virtual clock. Exit code 0; 2 for a "
        "scenario that cannot be read.",
    )
    parser.add_argument(
        "scenario",
        metavar="SCENARIO",
        help=f"a TOML file, or one that is shipped: {', '.join(shipped())}",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="such as engine.slots=32"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B,…",
        help="a run for each value; with several of them, for each combination",
    )
    parser.add_argument("--json", action="store_true", help="all numbers, for machines")
    return parser


def shipped() -> list[str]:
    """Return the names of the scenarios that come with the package."""
    return sorted(each.stem for each in SHIPPED.glob("*.toml"))


def _combinations(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the settings of each run, as `key=value`: all combinations of the sweeps' values.

    Errors: `ValueError` for a sweep of another form.
    """
    options = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not values:
            raise ValueError(f"--sweep {sweep!r}; write key=a,b,…, such as staleness=0,1,2")
        options.append([f"{key}={value}" for value in values.split(",")])
    return list(itertools.product(*options))


if __name__ == "__main__":
    sys.exit(main())
