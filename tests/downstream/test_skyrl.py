"""SkyRL's own model wrapper and `optim_step` on two ranks: aborted, inferring and exporting.

`SKYRL_SOURCE` names a checkout of SkyRL. Its data, losses and weight exchange are replaced by small
ones; the calls, the deferred reduction and the step are SkyRL's.
"""

from __future__ import annotations

import os
import sys

import pytest

from megatron_idempotent.proof.cpu import RankError

SOURCE = os.environ.get("SKYRL_SOURCE", "")
Outcome = tuple[list[float], bytes]

pytestmark = pytest.mark.skipif(not SOURCE, reason="SKYRL_SOURCE names no checkout of SkyRL")


def start(*, applied: bool = True, **layout: bool):
    """Runs on a rank: SkyRL's wrapper and worker around a small model."""
    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    if applied:
        megatron_idempotent.apply()
    from megatron_idempotent.patches.frameworks._skyrl import SkyRL

    return SkyRL(**layout)


def windows(
    fail: tuple[str, int] | None, *, inferring: bool = False, applied: bool = True
) -> Outcome:
    """Runs on a rank: windows of two calls each; before the second one, a call that raises."""
    skyrl = start(applied=applied, overlap_grad_reduce=False)
    for step in range(3):
        if step == 1 and fail is not None:
            skyrl.failing(fail, lambda: skyrl.forward_backward(77))
        skyrl.forward_backward(step)
        if inferring:
            skyrl.logprobs(5)
            skyrl.failing(("loss", 1), lambda: skyrl.logprobs(5))
            del skyrl.losses[-4:]
        skyrl.forward_backward(step + 10)
        skyrl.step()
    return skyrl.outcome()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
def test_a_window_that_raised_leaves_no_trace_in_later_windows(site, index, megatron_ranks):
    assert megatron_ranks(2, windows, (site, index)) == megatron_ranks(2, windows, None)


def test_on_stock_the_step_after_a_window_that_raised_is_silently_another(megatron_ranks):
    failed = megatron_ranks(2, windows, ("loss", 3), applied=False)
    assert failed != megatron_ranks(2, windows, None, applied=False)


def test_windows_that_do_not_fail_have_the_bits_of_stock(megatron_ranks):
    assert megatron_ranks(2, windows, None) == megatron_ranks(2, windows, None, applied=False)


def test_logprobs_inside_of_a_window_change_nothing(megatron_ranks):
    found = megatron_ranks(2, windows, None, inferring=True)
    assert found == megatron_ranks(2, windows, None)


def lost() -> tuple[str, Outcome]:
    """Runs on a rank: a window whose second call raises; its step, and the window again."""
    skyrl = start(overlap_grad_reduce=False)
    skyrl.train(0)
    skyrl.forward_backward(1)
    skyrl.failing(("loss", 1), lambda: skyrl.forward_backward(77))
    skyrl.forward_backward(11)
    with pytest.raises(RuntimeError) as refusal:
        skyrl.step()
    del skyrl.losses[4:]
    skyrl.forward_backward(1)
    skyrl.forward_backward(11)
    skyrl.step()
    return str(refusal.value), skyrl.outcome()


def whole() -> Outcome:
    """Runs on a rank: the same, and nothing raises."""
    skyrl = start(overlap_grad_reduce=False)
    skyrl.train(0)
    skyrl.forward_backward(1)
    skyrl.forward_backward(11)
    skyrl.step()
    return skyrl.outcome()


def test_a_step_refuses_a_window_of_which_a_later_call_raised(megatron_ranks):
    said, outcomes = zip(*megatron_ranks(2, lost), strict=True)
    assert all("Run the whole window again" in text for text in said)
    assert list(outcomes) == megatron_ranks(2, whole)


def overlapped() -> None:
    """Runs on a rank: two calls in a window with overlap_grad_reduce, for which SkyRL sets
    nothing."""
    skyrl = start(overlap_grad_reduce=True)
    skyrl.train(0)
    skyrl.forward_backward(1)
    skyrl.forward_backward(11)
    skyrl.step()


def test_a_window_of_two_calls_is_refused_with_overlap_grad_reduce(megatron_ranks):
    with pytest.raises(RankError, match="after its bucket was reduced"):
        megatron_ranks(2, overlapped)


def exported(applied: bool = True) -> bytes:
    """Runs on a rank: the weights that go to the inference engine after a step."""
    skyrl = start(applied=applied, overlap_param_gather=True)
    skyrl.train(0)
    return skyrl.exported()


def test_a_weight_sync_right_after_a_step_sends_the_step(megatron_ranks):
    first, second = megatron_ranks(2, exported)
    assert first == second
    first, second = megatron_ranks(2, exported, applied=False)
    assert first != second, "stock sends a mixture, another one from each replica"
