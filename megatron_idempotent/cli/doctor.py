"""`doctor`: what would be applied here, and why. Imports neither torch nor Megatron."""

from __future__ import annotations

import json

from megatron_idempotent.engine.control import apply
from megatron_idempotent.engine.report import Row
from megatron_idempotent.engine.source import locate
from megatron_idempotent.engine.table import render


def doctor(*, as_json: bool) -> int:
    """Print a row per patch; 1 where somebody has to look, else 0."""
    report = apply(dry_run=True)
    if as_json:
        print(json.dumps([row.as_dict() | {"files": _files(row)} for row in report], indent=2))
    else:
        rows = [(row.id, row.status, row.version or "-", _where(row), row.reason) for row in report]
        print(render(("id", "status", "version", "where", "reason"), rows))
    return 1 if report.problems else 0


def _where(row: Row) -> str:
    names = [target.partition(":")[2].rpartition(".")[2] for target in row.targets]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _files(row: Row) -> dict[str, str | None]:
    return {
        target: None if (path := locate(target.partition(":")[0])) is None else str(path)
        for target in row.targets
    }
