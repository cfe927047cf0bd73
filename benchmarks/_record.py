"""Parses a benchmark's options, and prints its results or writes them to a file.

Importing the module does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_CPUS = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")
#: Numeric fields that are part of a row's name, and their formats.
_NAMES = {"tokens": "{} tokens", "kept": "{:.0%} kept"}


def options(doc: str) -> argparse.ArgumentParser:
    """Return an argument parser with the option `--json`. The parser's description is the first
    line of `doc`, a benchmark's docstring.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def tell(found: Any, as_json: bool = False) -> None:
    """Print results: a line for each number and each text, or one JSON object."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    for name, value in leaves("", found):
        print(f"{name:70} {value if isinstance(value, str) else format(value, '.4g')}", flush=True)


def progress(part: str) -> None:
    """Print to standard error which part of a benchmark begins."""
    print(f"{datetime.now():%H:%M:%S} {part} …", file=sys.stderr, flush=True)


def leaves(at: str, found: Any) -> Iterator[tuple[str, float | str]]:
    """Yield (path, value) for each number and text in nested results; the path has all keys on the
    way to the value, joined by commas.

    In a path, a row of a list is named by its texts and the fields in `_NAMES`, else by its index.
    """
    if isinstance(found, (int, float, str)):
        yield at, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from leaves(f"{at}, {key}" if at else str(key), value)
    elif isinstance(found, Sequence):
        for index, each in enumerate(found):
            held = each if isinstance(each, Mapping) else {}
            words = [value for value in held.values() if isinstance(value, str)]
            words += [
                form.format(held[key]) for key, form in _NAMES.items() if held.get(key, 1) != 1
            ]
            step = ", ".join(words) or str(index)
            rest = {k: v for k, v in held.items() if not isinstance(v, str) and k not in _NAMES}
            yield from leaves(f"{at}, {step}" if at else step, rest if held else each)


def machine(*, busy: bool = False) -> dict[str, Any]:
    """Return a description of this machine before a benchmark: processor, load and versions of
    packages.

    `load_per_core` is the load average of the last minute, which includes the previous benchmark.
    `use_per_core` is the average utilization of a core in the next second. In a container, both may
    miss processes outside of it, so the caller can also pass `busy`: True if the machine runs other
    programs.
    """
    cores = os.cpu_count() or 1
    return {
        "cpu": _cpu(),
        "cores": cores,
        "load_per_core": round(os.getloadavg()[0] / cores, 2),
        "use_per_core": _use(),
        "busy": busy,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "megatron-core")},
    }


def _use(seconds: float = 1.0) -> float | None:
    """Measure for `seconds` how busy this machine's cores are on average, from 0 to 1; return None
    without /proc/stat.
    """
    before = _times()
    if before is None:
        return None
    time.sleep(seconds)
    used, everything = (b - a for a, b in zip(before, _times() or before, strict=True))
    return round(used / everything, 2) if everything else None


def _times() -> tuple[int, int] | None:
    """Return the clock ticks since boot in which cores were busy, and all ticks of all cores."""
    if not _STAT.exists():
        return None
    ticks = [int(each) for each in _STAT.read_text("ascii").splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # the columns idle and iowait
    return sum(ticks) - idle, sum(ticks)


def _cpu() -> str:
    lines = _CPUS.read_text("utf-8").splitlines() if _CPUS.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def captured(name: str, main: Callable[[], None]) -> Any:
    """Run a benchmark's `main`, and return what it prints to standard output, parsed as JSON.

    Raises:
        ValueError: the output is not one JSON object.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main()
    try:
        return json.loads(printed.getvalue())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} --json printed {printed.getvalue()[:200]!r}, which is no JSON ({error}): "
            "print one object"
        ) from None


def record(
    folder: Path, name: str, before: Mapping[str, Any], arguments: Sequence[str], found: Any
) -> Path:
    """Write a benchmark's results, with machine and time, to FOLDER/NAME.json; return its path."""
    told = {
        "ran": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "arguments": list(arguments),
        "machine": dict(before),
        "found": found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(f"{json.dumps(told, indent=1)}\n", encoding="utf-8")
    return path
