"""ms-swift's own `train_step` and `evaluate` on two ranks with both overlap flags: failures.

`MS_SWIFT_SOURCE` names a checkout of ms-swift, or an unpacked wheel. Data and losses are replaced
by small ones; window, step and evaluation are ms-swift's.
"""

from __future__ import annotations

import os
import sys

import pytest

SOURCE = os.environ.get("MS_SWIFT_SOURCE", "")
Outcome = tuple[list[float], bytes]

pytestmark = pytest.mark.skipif(not SOURCE, reason="MS_SWIFT_SOURCE names no checkout of ms-swift")


def windows(
    fail: tuple[str, int] | None, *, inferring: bool = False, applied: bool = True
) -> Outcome:
    """On a rank: steps; after the first, one that raises, or evaluations, one of which raises."""
    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    if applied:
        megatron_idempotent.apply()
    from megatron_idempotent.patches._swift import Swift

    swift = Swift(overlap_param_gather=True)
    for step in range(3):
        if step == 1 and fail is not None:
            swift.failing(fail, lambda: swift.train(77))
        if step == 1 and inferring:
            swift.logprobs(5)
            swift.failing(("loss", 1), lambda: swift.logprobs(5))
            del swift.losses[4:]
        swift.train(step)
    return swift.outcome()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
def test_a_step_that_raised_leaves_no_trace_in_later_steps(site, index, megatron_ranks):
    assert megatron_ranks(2, windows, (site, index)) == megatron_ranks(2, windows, None)


def test_evaluations_between_steps_change_nothing(megatron_ranks):
    found = megatron_ranks(2, windows, None, inferring=True)
    assert found == megatron_ranks(2, windows, None)


def test_steps_that_do_not_fail_have_the_bits_of_stock(megatron_ranks):
    assert megatron_ranks(2, windows, None) == megatron_ranks(2, windows, None, applied=False)
