"""Writes docs/state.md: which state each format keeps to the bit, on each Megatron.

`python -m benchmarks._states FOLDER` merges the files in that folder into docs/state.json and
writes the page again. `nox -s states` leaves there, for each Megatron and adapter, what
`certify --state --json` said, as `MEGATRON/ADAPTER.json`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.proof.certify import STATE_CHECKS

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
# Saved, loaded, rolled back, resharded, offloaded: the same bits

Each row is a check of `certify --state`, and each column a Megatron. A reference run takes three
steps, with dropout, a schedule of rates and a loss scale that moves, and nothing between them; each
draws from all random states, and none leaves what a new model has ([certify.md](certify.md)).
After a save, a load or an offload the next step must have the reference's bits on each rank:
gradient norm and loss, weights, main weights, moments, rates, random states, loss scale, experts'
biases. `ok` says that it has, in all layouts that were run; **no** is a fault in one or more, named
below the table; – is what the format does not offer. Nothing is compared within a tolerance. Where
a format rounds (weights that are loaded alone have 16 bits), plain copies rounded the reference in
the same way. On another number of ranks sums have other orders: there the whole model's state is
compared after the load, and the next step with a step from a state that plain copies put there.

Runs before 2026-11-29 varied less: nothing drew from the random states of Python, NumPy and
experts, the loss scale was never between two changes, no asynchronous writer failed, and of each
checkpoint the largest file alone was spoilt. `offload-again` was not made. No run here has
`saved-again` yet, writers in threads that were held back, other hashes in new processes, an older
checkpoint beside a spoilt one, or an offload of a part in an open step.

The patches of this library are applied. Not run: Megatron-FSDP, Transformer Engine, a file system
other than a local one, a dataloader that keeps a state of its own (`--dataloader-save`). Releases
before 0.16 cannot save torch's Adam of today. nvidia-resiliency-ext is that of its commit d8686d9,
and 0.7.0 where its process stays.

What fails, and why:

- *`fully_sharded_model_space` cannot be saved any more*, from 0.16 on, though it is what
  `DistributedOptimizer.sharded_state_dict` takes where its caller names no format.
- *A rank may crash after a save that it could not write, on Python 3.12.0 and 3.12.1*: torch's
  writer leaves a view of an `io.BytesIO` in a reference cycle, and these end in the collector there
  ([CPython 111049](https://github.com/python/cpython/issues/111049)). Take a later one.
- *A run without expert parallelism cannot be loaded with it*, and the other way: one optimizer
  becomes two, `ChainedOptimizer.load_state_dict` counts what it is given, and raises.

Without the patches a load that fails leaves a mixture, and other ranks waiting
([`failed-load-half-done`](../HAZARDS.md#failed-load-half-done),
[`spoilt-checkpoint-ends-well`](../HAZARDS.md#spoilt-checkpoint-ends-well)). So does a save
([`failed-save-unknown-to-others`](../HAZARDS.md#failed-save-unknown-to-others),
[`failed-dist-save-hangs`](../HAZARDS.md#failed-dist-save-hangs)), and one whose persistent writer
dies ([`dead-checkpoint-writer-hangs`](../HAZARDS.md#dead-checkpoint-writer-hangs)).
Expert-parallel ranks go on with the random states of one of them
([`expert-random-states-shared`](../HAZARDS.md#expert-random-states-shared)). With torch 2.15 a
checkpoint cannot be asked what it has
([`checkpoint-shapes-unreadable`](../HAZARDS.md#checkpoint-shapes-unreadable)). What fails after a
file's length was found right (wrong bytes, a disk that breaks off) may still leave a part. The
error says so: load a whole checkpoint before a step.

The distributed optimizer's own `state_dict()` is no format: it has neither moments nor main
parameters ([`state-dict-without-state`](../HAZARDS.md#state-dict-without-state)). What is loaded
into has to be built by `sharded_state_dict(…, is_loading=True)`: otherwise, with the Adam of
Transformer Engine or Apex, an optimizer that never stepped asks for main parameters alone, and goes
on with moments of zero ([AReaL #1468](https://github.com/areal-project/AReaL/pull/1468)). With
torch's Adam and the patches both are loaded. A model whose experts alone are trained can be saved
([`stub-optimizer-cannot-be-saved`](../HAZARDS.md#stub-optimizer-cannot-be-saved)).

`megatron.training.checkpointing.save_checkpoint` gathers no parameters that a step has left to the
next forward (`overlap_param_gather`); upstream's loop does so before, and so do these adapters. A
format that gathers nothing, `--ckpt-format torch`, writes old weights otherwise:
[`params-exported-before-gather`](../HAZARDS.md#params-exported-before-gather).

This page is generated from [state.json](state.json) by `python -m benchmarks._states`.
`nox -s states -- 0.19.2` runs a Megatron again, and this a single row:

    megatron-idempotent certify --state --check rollback --layout dp2-bf16-distopt \\
      megatron_idempotent.proof.certify.checkpoints:FullyReshardable
"""


def page(found: Found) -> str:
    """Return the page: a table for each format, and its faults."""
    parts, shown = [], set()
    for adapter, title in ADAPTERS.items():
        parts += [f"## {title}", ""]
        if not any(adapter in each for each in found.values()):
            parts += ["Not run yet.", ""]
            continue
        runs: dict[str, Verdicts] = {
            name: each.get(adapter, {}).get("layouts", {}) for name, each in found.items()
        }
        dates = {name: found[name][adapter]["date"] for name in runs if runs[name]}
        places = dict.fromkeys(f"`{layout}`" for run in runs.values() for layout in run)
        said = ", ".join(f"{name} on {day}" for name, day in dates.items())
        parts += [f"In {', '.join(places)}; {said}.", ""]
        parts += [line("check", *runs), line(*["---"] * (len(runs) + 1))]
        for name in STATE_CHECKS:
            cells = [_cell(name, run) for run in runs.values()]
            if {*cells} & {"ok", "**no**"} or "–" not in cells:
                shown.add(name)
                parts.append(line(f"`{name}`", *cells))
        told = faults(runs, "failed", "declared")
        parts += ["", *told, ""] if told else [""]
    demands = [
        line(f"`{name}`", check.summary) for name, check in STATE_CHECKS.items() if name in shown
    ]
    head = [_HEAD, "## What each check demands", "", line("check", "demands that")]
    return "\n".join([*head, line("---", "---"), *demands, "", *parts])


def _cell(check: str, run: Verdicts) -> str:
    verdicts = {checks[check][0] for checks in run.values() if check in checks}
    if not verdicts:
        return "not run"
    if verdicts & {"failed", "declared"}:
        return "**no**"
    return "ok" if "passed" in verdicts else "–"


def main(argv: Sequence[str], root: Path) -> int:
    """Merge the findings of the folder that is given, if one is, and write the page."""
    known = write(argv, root / FOUND, functools.partial(read, known=ADAPTERS))
    (root / PAGE).write_text(page(known), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path.cwd()))
