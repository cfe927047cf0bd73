"""A step is told its rate and size when it ends; and steps in which nothing is valid."""

from __future__ import annotations

from typing import Any

import pytest


def told_late(engine: str) -> None:
    """Runs on a rank: batch size and learning rate are given to finish(), as Tinker's client does.

    Against a step whose schedule has that rate.
    """
    from scenario import ROWS, Bench, TokenLoss, data, raised_by

    found = []
    for lr in (1e-3, 2e-3):
        bench = Bench(engine)
        before = bench.parameters()
        step_id = bench.step.begin(TokenLoss(), micro_batch_size=ROWS)
        bench.step.microbatch(step_id, data(1, ROWS, bench.replica))
        for wrong in (-1.0, float("nan"), "1e-3", True):
            assert "as lr" in str(raised_by(bench.step.finish, step_id, lr=wrong))
        if engine == "megatron":
            told = raised_by(bench.step.finish, step_id, lr=lr)
            assert "no global_batch_size" in str(told)
        result = bench.step.finish(step_id, lr=lr, global_batch_size=8)
        assert result.lr == lr
        assert result.rows[0]["lr"] == lr
        found.append((bench.parameters() - before).double())
    # Adam's first update is the learning rate times a number near 1 that does not depend on it,
    # plus decay by the rate: two roundings of a parameter, each of half a unit in its last place.
    bound = 3 * 2**-24 * bench.parameters().double().abs().max() * 2
    assert (found[0] * 2 - found[1]).abs().max() <= bound
    assert found[0].abs().max() > 5e-4


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_step_is_told_its_learning_rate_and_batch_size_when_it_ends(megatron_ranks, engine):
    megatron_ranks(2, told_late, engine)


def put_back(engine: str) -> None:
    """Runs on a rank: ranks that give other rates stop, and abort() puts the old one back."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, data, raised_by

    bench = Bench(engine)
    digest = bench.digest()
    step_id = bench.step.begin(TokenLoss(), micro_batch_size=ROWS, global_batch_size=8)
    bench.step.microbatch(step_id, data(1, ROWS, bench.replica))
    told = raised_by(bench.step.finish, step_id, lr=1.0 + torch.distributed.get_rank())
    assert "finish(lr)=2.0 where rank 0 has 1.0" in str(told)
    bench.step.abort()
    assert bench.digest() == digest


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_ranks_that_give_other_rates_are_told_and_nothing_has_changed(megatron_ranks, engine):
    megatron_ranks(2, put_back, engine)


def empty(engine: str, options: dict[str, Any]) -> None:
    """Runs on a rank: a step of masked samples under both rules, from a loss of a constant 0."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, data, raised_by, split_step

    class Constant(TokenLoss):
        def __call__(self, output, microbatch):
            if not microbatch["sample_mask"].any():
                return 0.0, {"nll": 0.0}
            return super().__call__(output, microbatch)

    told = raised_by(Bench, engine, step={"nothing_valid": "ignore"})
    assert "nothing_valid must be one of 'skip', 'update', got 'ignore'" in str(told)
    batch = data(1, 2 * ROWS, 0)
    masked = {**batch, "sample_mask": torch.zeros(2 * ROWS).cuda()}
    for rule, updated in (("skip", False), ("update", True)):
        bench = Bench(engine, step={"nothing_valid": rule}, **options)
        # Momentum, which moves parameters in a step without gradients.
        split_step(bench.step, Constant(), data(2, ROWS, bench.replica), [1])
        before = bench.parameters()
        for loss in (Constant(), TokenLoss()):
            result = split_step(bench.step, loss, masked, [1, 1])
            assert result.updated == updated
            assert result.metrics["nll"] == 0.0
            assert (result.skipped is None) == updated
            assert result.grad_norm == (0.0 if updated else None)
        assert torch.equal(bench.parameters(), before) != updated
    # Half of the microbatches have a constant loss, on one rank only: they count as zeros.
    norms = []
    for loss in (Constant(), TokenLoss()):
        bench = Bench(engine, **options)
        mine = data(1, 2 * ROWS, bench.replica)
        if bench.replica == 0:
            mine["sample_mask"][:ROWS] = 0
        norms.append(split_step(bench.step, loss, mine, [1, 1]).grad_norm)
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    ("engine", "options"),
    [("megatron", {}), ("megatron", {"pp": 2}), ("megatron", {"tp": 2}), ("fsdp", {})],
    ids=["dp2", "pp2", "tp2", "fsdp"],
)
def test_a_step_in_which_nothing_is_valid_does_as_it_was_told(megatron_ranks, engine, options):
    megatron_ranks(2, empty, engine, options)


def all_fail() -> tuple[str, str]:
    """Runs on a rank: all losses fail; the first lines of the error, and of its pickled copy."""
    import pickle

    import torch
    from scenario import ROWS, Bench, TokenLoss, data, raised_by

    rank = torch.distributed.get_rank()
    bench = Bench("megatron", pp=2, layers_per_stage=1)

    class Loss(TokenLoss):
        def __call__(self, output, microbatch):
            raise LookupError(f"bad sample of rank {rank}\nin the file")

    step_id = bench.step.begin(Loss(), micro_batch_size=ROWS, global_batch_size=8)
    told = raised_by(bench.step.microbatch, step_id, data(1, ROWS, bench.replica), last=True)
    copy = pickle.loads(pickle.dumps(told))
    bench.step.abort()
    return str(told).splitlines()[0], str(copy).splitlines()[0]


def test_an_aborted_window_begins_with_the_ranks_own_error(megatron_ranks):
    found = megatron_ranks(4, all_fail)
    for rank in (2, 3):  # the last stages, which have the loss
        assert found[rank] == (f"rank {rank}: loss: LookupError: bad sample of rank {rank}",) * 2
    assert found[0][0].startswith("rank 2: loss: LookupError")
