"""Writes docs/state.md: which state each format keeps to the bit, on each Megatron.

`python -m benchmarks._states FOLDER` merges the files in that folder into docs/state.json and
writes the page and its grid again. `nox -s states` leaves there, for each Megatron and adapter,
what `certify --state --json` said, as `MEGATRON/ADAPTER.json`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_idempotent.proof.certify import STATE_CHECKS

from . import _grid
from ._layouts import Found, Verdicts, faults, line, read, write

FOUND = Path("docs", "state.json")
PAGE = Path("docs", "state.md")
ADAPTERS = {
    "DPReshardable": "`dp_reshardable`: the optimizer's buffers as they are",
    "FullyReshardable": "`fully_reshardable`: state by parameter, gathered on one rank",
    "ModelSpace": "`fully_sharded_model_space`: state by parameter, from all ranks",
    "Persistent": "`dp_reshardable`, written by a process that stays (persistent worker)",
    "OnHost": "`dp_reshardable`, half of the optimizer on the host (`--optimizer-cpu-offload`)",
    "LowRank": "`dp_reshardable`, low-rank adapters of 32 bits over a frozen base of 16",
    "Training": "`megatron.training.checkpointing`, `--ckpt-format torch_dist`",
    "TrainingFully": "The same with `--dist-ckpt-optim-fully-reshardable`",
    "Legacy": "The same with `--ckpt-format torch`",
    "Resilient": "`megatron.training.checkpointing`, asynchronously by nvidia-resiliency-ext",
    "ResilientPersistent": "The same by its process that stays (persistent worker)",
}
"""The adapters of `certify.checkpoints`, and what each table of the page is about."""
_HEAD = """\
# State: which format keeps what, to the bit

A run that was saved, loaded, rolled back, moved to other ranks or offloaded has to go on as if
nothing had happened: [`certify --state`](certify.md#state) compares every bit, within no tolerance.
A cell of the table has the checks that Megatron's format passes, of those that were run, in all
layouts; **bold** where one failed. The patches of this library are applied.

"""
_TAIL = """
[The grid](assets/grids/state.json) has each check by itself, with layouts and days; the site draws
it below this paragraph.

What fails, and why:

- *`fully_sharded_model_space` cannot be saved any more*, from 0.16 on, though it is what
  `DistributedOptimizer.sharded_state_dict` takes where its caller names no format:
  `ShardedTensor.flattened_range is not supported`.
- *A rank may crash after a save that it could not write, on Python 3.12.0 and 3.12.1*: torch's
  writer leaves a view of an `io.BytesIO` in a reference cycle, and these end in the collector there
  ([CPython 111049](https://github.com/python/cpython/issues/111049)). Take a later one.
- *A run without expert parallelism cannot be loaded with it*, and the other way: one optimizer
  becomes two, `ChainedOptimizer.load_state_dict` counts what it is given, and raises.

What the patches do not mend: after a load that fails on a file whose length was right (wrong bytes,
a disk that breaks off), weights may be a mixture. The error says so: load a whole checkpoint before
a step. Build what you load into by `sharded_state_dict(…, is_loading=True)`: otherwise, with the
Adam of Transformer Engine or Apex, an optimizer that never stepped goes on with moments of zero
([AReaL #1468](https://github.com/areal-project/AReaL/pull/1468)). The distributed optimizer's own
`state_dict()` is no format ([`state-dict-without-state`](../HAZARDS.md#state-dict-without-state)).
Without the patches a failed load leaves a mixture, and other ranks waiting
([`failed-load-half-done`](../HAZARDS.md#failed-load-half-done)).

Not run: Megatron-FSDP, Transformer Engine, a file system other than a local one, a dataloader that
keeps a state of its own (`--dataloader-save`). Releases before 0.16 cannot save torch's Adam of
today. No run has `saved-again`, an older checkpoint beside a spoilt one, or an offload of a part in
an open step yet; runs before 2026-11-29 drew nothing from the random states of Python, NumPy and
experts, and had no asynchronous writer that failed.

`nox -s states -- 0.19.2` runs a Megatron again, `python -m benchmarks._states` writes this page
from [state.json](state.json), and this runs a single check:

    megatron-idempotent certify --state --check rollback --layout dp2-bf16-distopt \\
      megatron_idempotent.proof.certify.checkpoints:FullyReshardable
"""


def page(found: Found) -> str:
    """Return the text of docs/state.md, with a table line for each checkpoint format."""
    lines = [line("", *found), line(*["---"] * (len(found) + 1))]
    for adapter, title in ADAPTERS.items():
        runs = _runs(found, adapter)
        if any(runs.values()):
            lines.append(line(title, *map(_summary, runs.values())))
    return "\n".join([f"{_HEAD}{chr(10).join(lines)}", _TAIL])


def _runs(found: Found, adapter: str) -> dict[str, Verdicts]:
    return {name: run.get(adapter, {}).get("layouts", {}) for name, run in found.items()}


def _summary(run: Verdicts) -> str:
    """Return a table cell for one checkpoint format on one Megatron: how many checks of state
    passed, of those that were run.
    """
    cells = [_cell(name, run) for name in STATE_CHECKS]
    passed, failed = cells.count("ok"), cells.count("no")
    if not passed + failed:
        return "not run"
    return f"**{passed}**/{passed + failed}" if failed else f"{passed}/{passed}"


def grid(found: Found) -> Iterator[_grid.Section]:
    """Yield a grid section for each checkpoint format that was run: a table of its checks' verdicts
    on each Megatron, and a list of the faults that these checks found.
    """
    for adapter, title in ADAPTERS.items():
        runs = _runs(found, adapter)
        if not any(runs.values()):
            continue
        dates = {name: found[name][adapter]["date"] for name in runs if runs[name]}
        places = dict.fromkeys(f"`{layout}`" for run in runs.values() for layout in run)
        days = ", ".join(f"{name} on {day}" for name, day in dates.items())
        said = f"In {', '.join(places)}; {days}. ok: in all layouts; no: a fault in one or more."
        rows = []
        for name, check in STATE_CHECKS.items():
            cells = [_cell(name, run) for run in runs.values()]
            if {*cells} & {"ok", "no"} or "–" not in cells:
                rows.append([f"`{name}`", *cells, check.summary])
        told = faults(runs, "failed", "declared")
        yield _grid.section(
            title,
            {"text": said},
            _grid.table(["check", *runs, "it demands that"], rows),
            *([{"list": told}] if told else []),
        )


def _cell(check: str, run: Verdicts) -> str:
    verdicts = {checks[check][0] for checks in run.values() if check in checks}
    if not verdicts:
        return "not run"
    if verdicts & {"failed", "declared"}:
        return "no"
    return "ok" if "passed" in verdicts else "–"


def main(argv: Sequence[str], root: Path) -> int:
    """Merge the results in the given folders, if any, into docs/state.json; write docs/state.md and
    its grid.
    """
    found = write(argv, root / FOUND, functools.partial(read, known=ADAPTERS))
    (root / PAGE).write_text(page(found), encoding="utf-8")
    _grid.write(root, PAGE.stem, grid(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path.cwd()))
