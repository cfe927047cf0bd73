"""ROLL's own `train_step` on two ranks, with and without overlap: a window that raises.

`ROLL_SOURCE` names a checkout of ROLL. Its data and the forward step of a microbatch are replaced
by small ones; the window, the step and what surrounds them are ROLL's.
"""

from __future__ import annotations

import os
import sys

import pytest

SOURCE = os.environ.get("ROLL_SOURCE", "")
Outcome = tuple[list[float], bytes]

pytestmark = pytest.mark.skipif(not SOURCE, reason="ROLL_SOURCE names no checkout of ROLL")


def windows(fail: tuple[str, int] | None, overlap: bool, applied: bool = True) -> Outcome:
    """On a rank: steps, and before the second one, one that raises."""
    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    if applied:
        megatron_idempotent.apply()
    from megatron_idempotent.patches._roll import Roll

    roll = Roll(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    for step in range(3):
        if step == 1 and fail is not None:
            roll.failing(fail, lambda: roll.train(77))
        roll.train(step)
    return roll.outcome()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
def test_a_step_that_raised_leaves_no_trace_in_later_steps(site, index, overlap, megatron_ranks):
    found = megatron_ranks(2, windows, (site, index), overlap)
    assert found == megatron_ranks(2, windows, None, overlap)


def test_on_stock_the_step_after_one_that_raised_is_silently_another(megatron_ranks):
    failed = megatron_ranks(2, windows, ("loss", 3), False, applied=False)
    assert failed != megatron_ranks(2, windows, None, False, applied=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_do_not_fail_have_the_bits_of_stock(overlap, megatron_ranks):
    patched = megatron_ranks(2, windows, None, overlap)
    assert patched == megatron_ranks(2, windows, None, overlap, applied=False)
