"""Each rank raises what docs/train-step/failures.md says if one fails, and the next step is right.

See test_stop_anywhere.py for failures at every call.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks, tiered
from scenario import ROWS, Bench, Fault, raised_by, scenario

from megatron_idempotent import SessionPoisoned, WindowAborted

OWN, ABORTED, POISONED, NOTHING = "Broken", "WindowAborted", "SessionPoisoned", "NoneType"
#: Layout and place → what rank 1, which fails, and rank 0 raise in `microbatch`, and then in
#: `finish` if that call raised nothing.
RAISED = {
    ("dp", "loss"): ((OWN,), (NOTHING, ABORTED)),
    ("dp", "layer"): ((OWN,), (NOTHING, ABORTED)),
    ("pp", "loss"): ((ABORTED,), (ABORTED,)),
    ("pp", "layer"): ((ABORTED,), (ABORTED,)),
    ("tp", "loss"): ((ABORTED,), (ABORTED,)),
    ("tp", "layer"): ((POISONED,), (POISONED,)),
    ("tp", "layer of all"): ((ABORTED,), (ABORTED,)),
    ("cp", "loss"): ((ABORTED,), (ABORTED,)),
    ("cp", "layer"): ((POISONED,), (POISONED,)),
    ("ep", "loss"): ((ABORTED,), (ABORTED,)),
    ("ep", "layer"): ((POISONED,), (POISONED,)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "dp": {"overlap_param_gather": True},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "ep": {"ep": 2, "experts": 4},
}
#: Those in which ranks learn of it in ways of their own, and whether in the last batch.
OFTEN = {
    *(("dp", "loss", True), ("dp", "layer", False), ("pp", "loss", True), ("pp", "layer", False)),
    *(("tp", "loss", True), ("tp", "layer", False), ("ep", "loss", False)),
}


def fail(options: dict[str, Any], where: str, last: bool) -> tuple[list[Any], bool]:
    """Runs on a rank: what its calls raise, and whether the next step is right."""
    place = where.removesuffix(" of all")
    fault = Fault(place, 1, (1,) if place == where else None)
    calls = [("begin",), ("batch", [2], {"last": last}), ("finish",), ("abort",), ("step", [2])]
    got = scenario({**options, "step": {"deadline_s": 3}}, calls, [fault])
    want = scenario(options, [("step", [2])])
    told = got.told[1:3] if got.told[1] is None else got.told[1:2]
    found = [
        (type(each).__name__, str(each), type(getattr(each, "__cause__", None)).__name__)
        for each in told
    ]
    return found, torch.equal(got.bits[0][2], want.bits[0][2])


@pytest.mark.parametrize(
    ("layout", "where", "last"),
    tiered([(*case, last) for case in RAISED for last in (False, True)], OFTEN),
)
def test_each_rank_raises_what_the_table_says(megatron_ranks, layout, where, last):
    (other, also), (failing, right) = megatron_ranks(2, fail, OPTIONS[layout], where, last)
    raised = [tuple(kind for kind, _, _ in each) for each in (failing, other)]
    assert tuple(raised) == RAISED[layout, where]
    kind, text, cause = failing[-1]
    assert OWN in (kind, cause), "the failing rank's error is what it raises, or the cause"
    if where == "loss":
        own = text if kind == OWN else "Broken: no reward"
        assert own.endswith("no reward")
        for _, told, _ in (other[-1], failing[-1]) if kind == ABORTED else other[-1:]:
            before = "loss: " if layout != "dp" else ""
            assert told.startswith(f"rank 1: {before}Broken: no reward")
    assert also
    assert right, "the next step is right"


def test_another_replica_is_told_in_finish(megatron_ranks):
    # Ranks 1 and 3 are two stages of the second replica, in which rank 1 fails.
    found = megatron_ranks(4, fail, {"pp": 2}, "layer", False)
    told = [tuple(kind for kind, _, _ in each) for each, _ in found]
    assert told == [(NOTHING, ABORTED), (ABORTED,)] * 2
    assert all(right for _, right in found)


def test_the_page_has_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "train-step" / "failures.md").read_text("utf-8")
    words = {OWN: "its own exception", ABORTED: "`WindowAborted`", POISONED: "`SessionPoisoned`"}
    for (layout, where), (failing, other) in RAISED.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| {layout} | {where} |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2:4] == [
            f"{words[told[-1]]} in `{('microbatch', 'finish')[len(told) - 1]}`"
            for told in (failing, other)
        ]


@on_ranks(4)
def test_a_batch_that_one_stage_cannot_take_is_taken_by_none() -> None:
    """A batch that one stage cannot take, one that differs, and then a good one.

    Only the second replica has them; the first goes on without a word.
    """
    bench = Bench(pp=2)
    batch = bench.batch(2)
    step_id = bench.begin()
    last = bench.rank == 3
    for given, part in (
        ({**batch, "sample_mask": torch.ones(1)} if last else batch, "rank 3: ValueError"),
        ({n: v[:ROWS] for n, v in batch.items()} if last else batch, "give all of them the same"),
    ):
        if bench.replica == 0:
            continue
        told = raised_by(bench.step.microbatch, step_id, given)
        assert isinstance(told, WindowAborted)
        assert part in str(told)
        assert "as it was" in str(told)
    bench.step.microbatch(step_id, batch)
    assert bench.step.finish(step_id).updated


def absent() -> float:
    """Runs on a rank: the other one never comes to the end of the step; seconds until that is
    told."""
    from torch.distributed.distributed_c10d import _get_default_store

    bench = Bench(step={"deadline_s": 2})
    step_id = bench.begin()
    bench.step.microbatch(step_id, bench.batch(1))
    start = time.monotonic()
    if bench.rank == 1:
        _get_default_store().wait(["told"])  # its connections last until then
        return 2.0
    told = raised_by(bench.step.finish, step_id)
    _get_default_store().set("told", "")
    assert isinstance(told, SessionPoisoned)
    assert "not all ranks came to finish of step 'step-0' within 2 s" in str(told)
    waited = time.monotonic() - start
    bench.step.abort()
    assert isinstance(raised_by(bench.begin), SessionPoisoned)
    return waited


def test_a_rank_that_does_not_come_ends_the_session_within_the_deadline(megatron_ranks):
    for waited in megatron_ranks(2, absent):
        assert 1 < waited < 4.5
