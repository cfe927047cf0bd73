"""`drift`: patches against Megatrons and frameworks, installed or not, as a grid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_idempotent.drift import Drift, Standing, compare, open_trees
from megatron_idempotent.engine.decide import MEGATRON
from megatron_idempotent.engine.source import locate
from megatron_idempotent.engine.table import render
from megatron_idempotent.engine.trees import INFO
from megatron_idempotent.engine.versions import UNKNOWN

CELLS: dict[Standing, str] = {
    "reviewed": "ok",
    "holds": "holds",
    "fixed_upstream": "fixed",
    "missing": "absent",
    "drifted": "DRIFT",
    "not_affected": "-",
}
LEGEND = """
ok: a person has read every body      holds: new, but with all that the patch relies on
fixed: upstream repaired it           DRIFT: new, and the patch would be refused
absent: not in this tree              -: the release is older than the hazard
*: upstream has mended the hazard by then, so apply() refuses it whatever the body says"""


def drift(paths: Sequence[str], *, as_json: bool, with_diff: bool) -> int:
    """Print a row per patch and a column per tree; 1 where a body drifted, else 0.

    Args:
        paths: wheels, folders of wheels and source trees; none for the installed Megatron.

    Raises:
        ValueError: a path that holds nothing that a patch is for, or none and no Megatron.
    """
    rows = compare(open_trees([Path(path) for path in paths] or [_installed()]))
    drifted = [row for row in rows if row.standing == "drifted"]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(_grid(rows))
        print(LEGEND)
        for row in drifted:
            print(f"\n{row.id} on {_name(row)}: {row.reason}")
            if with_diff:
                print(row.diff)
    return 1 if drifted else 0


def _installed() -> Path:
    found = locate(INFO)
    if found is None:
        raise ValueError("no megatron-core is installed: install it, or name a wheel or a checkout")
    return found.parents[INFO.count(".")]


def _grid(rows: Sequence[Drift]) -> str:
    names: dict[str, dict[str, None]] = {}  # by path, what is in it, in order
    for row in rows:
        names.setdefault(row.path, {})[_name(row)] = None
    cells = {(row.id, row.path): _cell(row) for row in rows}
    ids = list(dict.fromkeys(row.id for row in rows))
    grid = [[i, *(cells.get((i, path), "") for path in names)] for i in ids]
    return render(("patch", *(", ".join(each) for each in names.values())), grid)


def _name(row: Drift) -> str:
    if row.distribution == MEGATRON:
        return row.version
    version = Path(row.path).name if row.version == UNKNOWN.text else row.version
    return f"{row.distribution} {version}"


def _cell(row: Drift) -> str:
    outside = not row.in_range and row.standing != "not_affected"
    return CELLS[row.standing] + ("*" if outside else "")
