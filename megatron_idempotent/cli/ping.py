"""Implements `megatron-idempotent ping`, which shows the state of a run.

It imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_idempotent.rl.controller.status_file import (
    STATUS_FILE,
    NotRunning,
    StatusError,
    read_status,
)
from megatron_idempotent.rl.metrics.console import make_table, rows
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE

RUNS = Path("runs")

# Of a metrics file that may be long: some hundred rows.
_TAIL_BYTES = 1 << 18


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after `ping`; returns the exit code.

    It is 0 if the status was shown, or watched until the run ended; 1 if no controller writes a
    status; and 2 if no run was found.
    """
    options = _parser().parse_args(list(argv))
    directory = options.directory or _newest()
    if directory is None or not directory.is_dir():
        missing = (
            f"{directory}: no such directory" if directory else f"{RUNS}: no run has a status there"
        )
        print(f"{missing}; name the run's directory", file=sys.stderr)
        return 2
    try:
        if options.watch:
            return _watch(directory, options)
        status = read_status(directory / STATUS_FILE, old_s=options.timeout)
    except StatusError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    if options.json:
        print(json.dumps(status))
    else:
        _print(status, _last_metrics(directory))
    return 0


def _watch(directory: Path, options: argparse.Namespace) -> int:
    """Show the run until it has ended; returns the exit code.

    Errors: `StatusError` if the first look finds no current status.
    """
    table = None if options.json else make_table(sys.stdout, every_s=0.0)
    answered = False
    try:
        while True:
            try:
                status = read_status(directory / STATUS_FILE, old_s=options.timeout)
            except StatusError as error:
                if not answered:
                    raise
                print(error, file=sys.stderr)
                if isinstance(error, NotRunning):
                    return 0
            else:
                answered = True
                if table is None:
                    print(json.dumps(status), flush=True)
                else:
                    table.log(_last_metrics(directory), step=status["trainer_version"])
                    table.show(status, time.monotonic())
                if status["state"] == "ended":
                    return 0
            time.sleep(options.every)
    finally:
        if table is not None:
            table.close()


def _print(status: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    named = rows(status, metrics)
    width = max(len(name) for name, _ in named)
    for name, told in named:
        print(f"{name:<{width}}  {told}")


def _last_metrics(directory: Path) -> dict[str, float]:
    """Return the newest value of each metric in the last rows of the run's metrics file.

    It returns nothing if there is no file, and prints a warning for a damaged one.
    """
    last: dict[str, float] = {}
    try:
        with (directory / METRICS_FILE).open("rb") as file:
            start = max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0)
            file.seek(start)
            # Lines that are cut off at either end are not whole.
            for line in file.read().split(b"\n")[1 if start else 0 : -1]:
                last.update(json.loads(line))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        print(f"{directory / METRICS_FILE}: {error}", file=sys.stderr)
    return last


def _newest() -> Path | None:
    """Return the run in `runs/` whose status is the newest; None if no run has one."""
    found = sorted(RUNS.glob(f"*/{STATUS_FILE}"), key=_changed)
    return found[-1].parent if found else None


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # that run has ended just now
        return 0.0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; allowed: seconds above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-idempotent ping",
        description="Show the state of an asynchronous run: versions, queues, what its loops do. "
        "Exit code 1 where no controller writes it.",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the run's directory; default: the newest in {RUNS}/",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--watch", action="store_true", help="go on until the run has ended")
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="S", help="seconds between two looks"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds after which a status is too old",
    )
    return parser
