"""A loss or a gradient that is not finite is refused on all ranks before anything is updated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import tiered
from scenario import Bench, TokenLoss, cut, raised_by
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent import WindowAborted

pytestmark = pytest.mark.full

ENGINES = {
    "megatron": ("megatron", {}),
    "megatron, experts on two ranks": ("megatron", {"experts": 4, "ep": 2}),
    "fsdp": ("fsdp", {}),
}


def _loss(what: str, bad: bool) -> Any:
    """A loss that is not finite on one rank, or one whose gradient alone is not."""

    class Loss(TokenLoss):
        def __call__(self, output, microbatch):
            loss, metrics = super().__call__(output, microbatch)
            if not bad:
                return loss, metrics
            zero = loss - loss.detach()
            slopes = {
                "loss is nan": loss * torch.nan,
                "loss is inf": loss * torch.inf,
                "gradients is nan": (zero * 0.0).sqrt(),  # 0 x infinity
                "gradients is inf": zero * 1e30,  # whose square float32 has not
            }
            return loss + slopes[what], metrics

    return Loss()


def _reads(run: Any) -> tuple[Any, int]:
    """Return what `run` returns, and how often it waits for a value from the device."""

    class Counting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func._opname == "_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        return run(), counting.number


def not_finite(engine: str, options: dict[str, Any], what: str, last: bool) -> None:
    """Runs on a rank: refused, and the step taken back; skipped; updated with, for who wants it."""
    rank = torch.distributed.get_rank()
    options = {**options, "distributed_optimizer": not last} if engine == "megatron" else {}

    def run(rule, loss):
        bench = Bench(engine, step={"non_finite": rule}, **options)
        pieces = list(cut(bench.batch(2), [1, 1]))
        bench.run([bench.batch(2, seed=2)])
        before, parameters = bench.digest(), bench.parameters()

        def one_step(loss=loss):
            return bench.run(pieces, last=last, loss=loss)

        return bench, before, parameters, one_step

    bad = _loss(what, rank == 1)
    bench, before, parameters, one_step = run("refuse", bad)
    told = raised_by(one_step)
    assert isinstance(told, WindowAborted), told
    text = what.replace("loss", "the loss of its microbatch 1")
    text = text.replace("gradients", "the norm of the gradients")
    assert text in str(told)
    assert set(told.failures) == ({1} if what.startswith("loss") else {0, 1})
    assert bench.step.open_step_id is not None
    bench.step.abort()
    assert bench.digest() == before
    good, refusing = _reads(lambda: one_step(TokenLoss()))
    assert good.updated

    bench, _, parameters, one_step = run("skip", bad)
    result = one_step()
    assert not result.updated
    assert text in result.skipped
    assert torch.equal(bench.parameters(), parameters)
    good, skipping = _reads(lambda: one_step(TokenLoss()))
    assert good.updated

    bench, _, _, one_step = run("update", bad)
    _, updating = _reads(lambda: one_step(TokenLoss()))
    assert one_step().updated
    assert what == "gradients is inf" or bench.parameters().isnan().any()

    # Looking costs no wait for the device: the norm that is reported is the one that is looked at.
    assert refusing == skipping == updating


WHATS = ("loss is nan", "loss is inf", "gradients is nan", "gradients is inf")
ALWAYS = {
    ("megatron", "loss is nan", True),
    ("megatron, experts on two ranks", "gradients is nan", False),
    ("fsdp", "gradients is nan", True),
}


@pytest.mark.parametrize(
    ("engine", "what", "last"), tiered(itertools.product(ENGINES, WHATS, (False, True)), ALWAYS)
)
def test_what_is_not_finite_updates_nothing(megatron_ranks, engine, what, last):
    megatron_ranks(2, not_finite, *ENGINES[engine], what, last)
