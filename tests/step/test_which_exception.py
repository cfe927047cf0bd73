"""Shows what each of two ranks raises where one fails in a step, as docs/train-step.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    "dp": {},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "ep": {"ep": 2, "experts": 4},
}


class Broken(Exception):
    """The failing rank raises this."""


def fail(options: dict[str, Any], where: str, last: bool) -> tuple[tuple[str, ...], bool, bool]:
    """Runs on a rank: what its calls raise, whether this rank's own error is the cause, and whether
    the next step is right."""
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, parameters, raised_by, split_step

    from megatron_idempotent import TrainStep
    from megatron_idempotent.window import rebuild_process_groups
    from megatron_idempotent.window.agreement import is_poisoned

    rank = torch.distributed.get_rank()
    here = rank == 1 or where.endswith("of all")

    class Failing(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            if where == "loss" and here:
                raise Broken("no reward")
            return super().__call__(output, microbatch)

    def broken(*_: Any) -> None:
        raise Broken("out of memory")

    def run(failing: bool) -> tuple[list[Any], Any]:
        model, scheduler, replica = build(**options)
        step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=3)
        batch = data(1, 2 * ROWS, replica)
        told: list[Any] = []
        if failing:
            mlp = model.chunks[0].module.decoder.layers[0].mlp
            hook = mlp.register_forward_pre_hook(broken) if where != "loss" and here else None
            step_id = step.begin(Failing(), global_batch_size=8, micro_batch_size=ROWS)
            told.append(raised_by(step.microbatch, step_id, batch, last=last))
            if told[0] is None:
                told.append(raised_by(step.finish, step_id))
            if hook is not None:
                hook.remove()
            step.abort(step_id)
            if is_poisoned():
                rebuild_process_groups(model.chunks, model.optimizer)
        split_step(step, TokenLoss(), batch, [2])
        return told, parameters(model)

    told, got = run(True)
    _, want = run(False)
    own = any(
        isinstance(each, Broken) or isinstance(each.__cause__, Broken) for each in told if each
    )
    return tuple(type(each).__name__ for each in told), own, torch.equal(got, want)


def _cases() -> list[Any]:
    """List all of them; some always, and the others with `-m exhaustive`."""
    often = {("dp", "loss"), ("dp", "layer"), ("pp", "layer"), ("tp", "layer"), ("cp", "loss")}
    return [
        pytest.param(
            *case,
            last,
            marks=() if case in often and not last else pytest.mark.exhaustive,
            id="-".join((*case, "last" if last else "not last")),
        )
        for case in RAISED
        for last in (False, True)
    ]


@pytest.mark.parametrize(("layout", "where", "last"), _cases())
def test_each_rank_raises_what_the_table_says(megatron_ranks, layout, where, last):
    other, failing = megatron_ranks(2, fail, OPTIONS[layout], where, last)
    assert (failing[0], other[0]) == RAISED[layout, where]
    assert failing[1], "the failing rank's error is what it raises, or the cause"
    assert failing[2]
    assert other[2], "the next step is right"


def test_another_replica_is_told_in_finish(megatron_ranks):
    # Ranks 1 and 3 are two stages of the second replica, in which rank 1 fails.
    told = megatron_ranks(4, fail, {"pp": 2}, "layer", False)
    assert [raised for raised, _, _ in told] == [(NOTHING, ABORTED), (ABORTED,)] * 2
    assert all(right for *_, right in told)


def test_the_page_has_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "train-step.md").read_text(encoding="utf-8")
    words = {OWN: "its own exception", ABORTED: "`WindowAborted`", POISONED: "`SessionPoisoned`"}
    for (layout, where), (failing, other) in RAISED.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| {layout} | {where} |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2:4] == [
            f"{words[told[-1]]} in `{('microbatch', 'finish')[len(told) - 1]}`"
            for told in (failing, other)
        ]
