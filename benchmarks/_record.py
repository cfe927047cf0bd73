"""Writes down what a benchmark found, on which machine, and when. Free of torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_CPUS = Path("/proc/cpuinfo")


def machine(*, busy: bool = False) -> dict[str, Any]:
    """Describe this machine before a benchmark.

    The load is that of what this system sees, which in a container may not be the whole machine:
    `busy` is the word of the caller that it does something else.
    """
    cores = os.cpu_count() or 1
    return {
        "cpu": _cpu(),
        "cores": cores,
        "load_per_core": round(os.getloadavg()[0] / cores, 2),
        "busy": busy,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "megatron-core")},
    }


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
