"""Reads a benchmark's options, and tells what it found, on a screen or in a file. Free of torch."""

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
#: Numbers that name a row of a list, as its words do.
_NAMES = {"tokens": "{} tokens", "kept": "{:.0%} kept"}


def options(doc: str) -> argparse.ArgumentParser:
    """Make a parser that describes a benchmark by the first line of its docstring."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def tell(found: Any, as_json: bool = False) -> None:
    """Print what was found: a line for each number and each refusal, or one JSON object."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    for name, value in leaves("", found):
        print(f"{name:70} {value if isinstance(value, str) else format(value, '.4g')}", flush=True)


def progress(part: str) -> None:
    """Say on standard error which part of a benchmark begins, for who waits for the result."""
    print(f"{datetime.now():%H:%M:%S} {part} …", file=sys.stderr, flush=True)


def leaves(at: str, found: Any) -> Iterator[tuple[str, float | str]]:
    """Yield each number and text with the names on the way to it; a list's row has its words."""
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
    """Describe this machine before a benchmark.

    `load_per_core` is the mean of the minute before, so that it has the benchmark that ran before
    this one. `use_per_core` is the part of each core that was used in the last second. Both are of
    what this system sees, which in a container may not be the whole machine: `busy` is the word of
    the caller that it does something else.
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
    """Measure the part of each core that is used; None where the system does not tell."""
    before = _times()
    if before is None:
        return None
    time.sleep(seconds)
    used, everything = (b - a for a, b in zip(before, _times() or before, strict=True))
    return round(used / everything, 2) if everything else None


def _times() -> tuple[int, int] | None:
    """Return the ticks that all cores were used for, and all their ticks, since the start."""
    if not _STAT.exists():
        return None
    ticks = [int(each) for each in _STAT.read_text("ascii").splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
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
    """Run a benchmark's `main`, and return the JSON that it prints.

    Raises:
        ValueError: it prints something else.
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
    """Write FOLDER/NAME.json, and return its path."""
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
