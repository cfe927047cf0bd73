"""AReaL's own engine on two ranks with both overlap flags: loss scale, log-probs and failures.

`AREAL_SOURCE` names a checkout of AReaL. Its data and the loss of a microbatch are replaced by
small ones; the optimizer's set-up, the window and the step are AReaL's.
"""

from __future__ import annotations

import os
import sys

import pytest

SOURCE = os.environ.get("AREAL_SOURCE", "")
Outcome = tuple[list[float], bytes]

pytestmark = pytest.mark.skipif(not SOURCE, reason="AREAL_SOURCE names no checkout of AReaL")


def start(*, applied: bool = True, **how: object):
    """On a rank: AReaL's engine around a small model."""
    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    if applied:
        megatron_idempotent.apply()
    from megatron_idempotent.patches._areal import Areal

    return Areal(overlap_param_gather=True, **how)


def norms(scale: float, applied: bool) -> tuple[list[float], Outcome]:
    """On a rank: the gradient norms of some fp16 steps, and their outcome."""
    areal = start(applied=applied, dtype="fp16", loss_scale=scale)
    return [areal.train(step) for step in range(3)], areal.outcome()


def test_fp16_steps_have_the_bits_of_stock_which_scales_its_losses_itself(megatron_ranks):
    stock = megatron_ranks(2, norms, 1024.0, False)
    assert megatron_ranks(2, norms, 1024.0, True) == stock
    assert all(norm == norm for norm in stock[0][0]), "finite"


def windows(fail: tuple[str, int] | None, inferring: bool = False) -> Outcome:
    """On a rank: steps; after the first one, one that raises, or log-probs, one of which raise."""
    areal = start()
    for step in range(3):
        if step == 1 and fail is not None:
            areal.failing(fail, lambda: areal.train(77))
        if step == 1 and inferring:
            areal.logprobs(5)
            areal.failing(("loss", 1), lambda: areal.logprobs(5))
            del areal.losses[4:]
        areal.train(step)
    return areal.outcome()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
def test_a_step_that_raised_leaves_no_trace_in_later_steps(site, index, megatron_ranks):
    assert megatron_ranks(2, windows, (site, index)) == megatron_ranks(2, windows, None)


def test_logprobs_between_steps_change_nothing(megatron_ranks):
    assert megatron_ranks(2, windows, None, True) == megatron_ranks(2, windows, None)
