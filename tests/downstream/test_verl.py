"""verl's own engine on two ranks with both overlap flags: log-probs between, and failures.

`VERL_SOURCE` names a checkout of verl, or an unpacked wheel. Its data and losses are replaced by
small ones; modes, window and step are verl's.
"""

from __future__ import annotations

import os
import sys

import pytest

SOURCE = os.environ.get("VERL_SOURCE", "")
Outcome = tuple[list[float], bytes]

pytestmark = pytest.mark.skipif(not SOURCE, reason="VERL_SOURCE names no checkout of verl")


def windows(
    fail: tuple[str, int] | None, *, inferring: bool = False, applied: bool = True
) -> Outcome:
    """On a rank: steps; after the first one, one that raises, or log-probs, one of which raise."""
    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    if applied:
        megatron_idempotent.apply()
    from megatron_idempotent.patches._verl import Verl

    verl = Verl(overlap_param_gather=True)
    for step in range(3):
        if step == 1 and fail is not None:
            verl.failing(fail, lambda: verl.train(77))
        if step == 1 and inferring:
            verl.logprobs(5)
            verl.failing(("loss", 1), lambda: verl.logprobs(5))
            del verl.losses[4:]
        verl.train(step)
    return verl.outcome()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
def test_a_step_that_raised_leaves_no_trace_in_later_steps(site, index, megatron_ranks):
    assert megatron_ranks(2, windows, (site, index)) == megatron_ranks(2, windows, None)


def test_logprobs_between_steps_change_nothing(megatron_ranks):
    found = megatron_ranks(2, windows, None, inferring=True)
    assert found == megatron_ranks(2, windows, None)


def test_steps_that_do_not_fail_have_the_bits_of_stock(megatron_ranks):
    assert megatron_ranks(2, windows, None) == megatron_ranks(2, windows, None, applied=False)
