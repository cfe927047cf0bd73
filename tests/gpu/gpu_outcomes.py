"""A pytest plugin that writes each test's outcome as it comes: `-p gpu_outcomes`.

A run that is killed at its limit leaves what it had found, one JSON object a line, in the file that
GPU_OUTCOMES names. With xdist it is the controlling process that writes.
"""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Write a test that has ended: after its call, or where it did not come to that."""
    path = os.environ.get("GPU_OUTCOMES")
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.outcome == "passed":
        return
    row = {
        "test": report.nodeid,
        "outcome": report.outcome if report.when == "call" or report.skipped else "error",
        "seconds": round(report.duration, 3),
        "why": _why(report),
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _why(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # where, line, reason of a skip
        return str(report.longrepr[2])
    return str(report.longreprtext)[-2000:]
