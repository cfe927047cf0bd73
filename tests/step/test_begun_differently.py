"""Ranks that begin a step with different arguments are told so before anything is updated."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest


def differently(engine: str, options: dict[str, Any]) -> list[dict[str, str]]:
    """Runs on a rank: what is heard where rank 1 begins otherwise, in `finish` and in a last
    batch."""
    import torch
    from scenario import Bench, SequenceLoss, TokenLoss, data, raised_by, split_step

    from megatron_idempotent import WindowAborted

    class OtherMetrics(TokenLoss):
        normalizers: ClassVar = {"rows": "tokens"}

    odd = torch.distributed.get_rank() == 1
    bench = Bench(engine, **options)
    batch = data(1, 4, bench.replica)
    before = bench.digest()
    found = []
    for last in (False, True):
        told = {}
        for name, loss, size in (
            ("kind", SequenceLoss if odd else TokenLoss, 8),
            ("global_batch_size", TokenLoss, 9 if odd else 8),
            ("normalizers", OtherMetrics if odd else TokenLoss, 8),
        ):
            error = raised_by(
                split_step, bench.step, loss(), batch, [1, 1], last=last, global_batch_size=size
            )
            assert isinstance(error, WindowAborted), (name, error)
            assert "abort() the step" in str(error)
            told[name] = error.failures[1]
            bench.step.abort()
            assert bench.digest() == before
        found.append(told)
    # Sizes of microbatches, and how many there are, are each replica's own.
    sizes = {"micro_batch_size": 1 if odd and bench.replica else 2, "rank_batch_size": 4}
    assert split_step(bench.step, TokenLoss(), batch, [1, 1], **sizes).updated
    other = Bench(engine, step={"non_finite": "skip" if odd else "update"}, **options)
    error = raised_by(split_step, other.step, TokenLoss(), batch, [2])
    found.append({"non_finite": error.failures[1]})
    return found


LAYOUTS = {
    "dp2": ("megatron", {}),
    "tp2": ("megatron", {"tp": 2}),
    "fsdp": ("fsdp", {}),
}


@pytest.mark.parametrize(("engine", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_arguments_that_differ_are_named_with_their_ranks(megatron_ranks, engine, options):
    first, *more = megatron_ranks(2, differently, engine, options)
    assert all(other == first for other in more)
    for told in first[:2]:
        assert "kind='sequence' where rank 0 has 'token'" in told["kind"]
        assert "global_batch_size=9 where rank 0 has 8" in told["global_batch_size"]
        assert "normalizers={'rows': 'tokens'} where rank 0 has {" in told["normalizers"]
    assert "non_finite='skip' where rank 0 has 'update'" in first[2]["non_finite"]
