"""The metrics file: one JSON object per step. Free of torch, for any reader."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, oldest first; none where there is no file.

    A last line that was cut off by the end of its process is left out, and so are rows of steps
    that were taken again, after ranks were lost. Errors: `ValueError` naming a damaged line.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: damaged ({error})") from error
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        rows.append(row)
    return rows


class JsonlLogger:
    """One JSON object per step, on disk when `log` returns.

    Example: `JsonlLogger(path).log({"train/loss": 0.5}, step=7)`, and `read_metrics(path)`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        # A run that is resumed writes again what the interrupted one had written past its
        # checkpoint: those lines go, or the file would tell of the same step twice.
        kept = [row for row in read_metrics(path) if first_step and row["step"] <= first_step]
        # Beside the file and renamed: a kill in between must not cost the rows that were there.
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
