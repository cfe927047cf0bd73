"""slime's own `train()`, once per rollout, on two ranks with both overlap flags.

`SLIME_SOURCE` names a checkout of slime. Its data, loss, logging and checkpoint modules are
replaced by small ones; the loop, the step and the wiring are slime's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest

from megatron_idempotent.patching.source import locate

SOURCE = os.environ.get("SLIME_SOURCE", "")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
STEPS = 6

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SOURCE, reason="SLIME_SOURCE names no checkout of slime"),
    pytest.mark.skipif(
        locate("megatron.training.training") is None,
        reason="this release's wheel does not carry megatron.training, which slime imports",
    ),
]


def start():
    """Runs on a rank: slime's model.py around a small program."""
    from megatron_idempotent.patches.frameworks._rollouts import Rollouts

    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    rows = megatron_idempotent.apply()
    assert rows["slime-train-reentry"].status == "pending_import"
    rollouts = Rollouts("slime", OVERLAP)
    assert megatron_idempotent.report()["slime-train-reentry"].status == "applied"
    return rollouts


def outcome(rollouts) -> tuple[list[float], list[float], bytes]:
    """Every microbatch's loss, every step's gradient norm where it is logged, the parameters."""
    return rollouts.losses, rollouts.norms, rollouts.program.parameters().numpy().tobytes()


def train(calls: Sequence[int]):
    """Runs on a rank: one rollout after the other, `calls` says of how many steps."""
    rollouts = start()
    for number, steps in enumerate(calls):
        rollouts.train(steps, first=sum(calls[:number]))
    return outcome(rollouts)


@pytest.mark.parametrize("calls", [(2, 2, 2), (1,) * STEPS, (5, 1)])
def test_rollouts_equal_one_long_call_bit_for_bit(calls, megatron_ranks):
    apart = megatron_ranks(2, train, calls)
    assert apart == megatron_ranks(2, train, (STEPS,))
    losses, norms, _ = apart[0]
    assert (len(set(losses)), len(set(norms))) == (4 * STEPS, STEPS), "every step must differ"
    assert apart[0][2] == apart[1][2], "the replicas' parameters"


def retried(fail_at: int) -> tuple[int, tuple[list[float], list[float], bytes]]:
    """Runs on a rank: a rollout whose data cannot be read in one step; the same again from
    there."""
    from megatron_idempotent.patches._case import Broken
    from megatron_idempotent.patches.frameworks._rollouts import MICROBATCHES

    rollouts = start()
    rollouts.fail_at = fail_at
    with pytest.raises(Broken):
        rollouts.train(STEPS, first=0)
    done = len(rollouts.losses) // MICROBATCHES
    del rollouts.losses[done * MICROBATCHES :]
    rollouts.fail_at = None
    rollouts.train(STEPS - done, first=done)
    return done, outcome(rollouts)


@pytest.mark.parametrize("fail_at", [1, 2, 4, 5, 8, 9, 16])
def test_a_rollout_that_failed_in_any_microbatch_goes_on_as_if_it_had_not(fail_at, megatron_ranks):
    found = megatron_ranks(2, retried, fail_at)
    assert [done for done, _ in found] == [(fail_at - 1) // 4] * 2
    assert [seen for _, seen in found] == megatron_ranks(2, train, (STEPS,))


def inferring(fail_at: int | None, passes: bool = True):
    """Runs on a rank: two rollouts, and log-probs before each, of which a pass may fail."""
    from megatron_idempotent.patches._case import Broken

    rollouts = start()
    for number in range(2):
        if passes:
            rollouts._read, rollouts.fail_at = 0, fail_at
            if fail_at is None:
                rollouts.infer(first=number)
            else:
                with pytest.raises(Broken):
                    rollouts.infer(first=number)
            rollouts.fail_at = None
        rollouts.train(1, first=number)
    return outcome(rollouts)


@pytest.mark.parametrize("fail_at", [None, 1, 3])
def test_log_probs_between_rollouts_change_nothing(fail_at, megatron_ranks):
    assert megatron_ranks(2, inferring, fail_at) == megatron_ranks(2, inferring, None, passes=False)
