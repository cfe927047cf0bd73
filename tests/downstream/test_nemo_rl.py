"""NeMo-RL's own workers on two ranks, with both overlap flags: aborted, inferring and exporting.

`NEMO_RL_SOURCE` names a checkout of NeMo-RL. Its data, metrics and weight exchange are replaced by
small ones; the workers' methods, and the forward and backward, are NeMo-RL's.
"""

from __future__ import annotations

import os
import sys

import pytest

from megatron_idempotent.proof.cpu import RankError

SOURCE = os.environ.get("NEMO_RL_SOURCE", "")
STEPS = 3
Outcome = tuple[list[float], bytes]

pytestmark = pytest.mark.skipif(not SOURCE, reason="NEMO_RL_SOURCE names no checkout of NeMo-RL")


def start(worker: str = "policy", *, applied: bool = True):
    """Runs on a rank: one of NeMo-RL's workers around a small model."""
    import megatron_idempotent

    sys.path.insert(0, SOURCE)
    if applied:
        megatron_idempotent.apply()
    from megatron_idempotent.patches.frameworks._nemo_rl import NemoRL

    return NemoRL(worker, overlap_param_gather=True)


def interrupted(
    what: str | None, at: tuple[str, int], worker: str = "policy", applied: bool = True
) -> Outcome:
    """Runs on a rank: windows, and between the first two of them a call that raises, if any."""
    nemo = start(worker, applied=applied)
    if what == "reference":
        nemo.remember_reference()
    calls = {
        "train": nemo.train,
        "evaluation": lambda seed: nemo.train(seed, eval_mode=True),
        "logprobs": nemo.logprobs,
        "reference": nemo.reference,
        "values": nemo.values,
    }
    for step in range(STEPS):
        if step == 1 and what is not None:
            nemo.failing(at, lambda: calls[what](77))
        nemo.train(step)
    return nemo.outcome()


FAILURES = [
    *[("train", (site, index)) for site in ("data", "loss", "backward") for index in (0, 3)],
    ("evaluation", ("loss", 1)),
    ("logprobs", ("data", 1)),
    ("logprobs", ("loss", 1)),
    ("reference", ("loss", 1)),
]


@pytest.mark.parametrize(("what", "at"), FAILURES)
def test_a_policy_call_that_raises_leaves_no_trace_in_later_windows(what, at, megatron_ranks):
    found = megatron_ranks(2, interrupted, what, at)
    assert found == megatron_ranks(2, interrupted, None, at)


@pytest.mark.parametrize(
    ("what", "at"),
    [("train", ("backward", 1)), ("evaluation", ("loss", 1)), ("values", ("data", 0))],
)
def test_a_value_call_that_raises_leaves_no_trace_in_later_windows(what, at, megatron_ranks):
    found = megatron_ranks(2, interrupted, what, at, "value")
    assert found == megatron_ranks(2, interrupted, None, at, "value")


@pytest.mark.parametrize("what", ["train", "evaluation", "logprobs"])
def test_on_stock_the_next_window_raises(what, megatron_ranks):
    with pytest.raises(RankError, match=r"already running|has not been issued"):
        megatron_ranks(2, interrupted, what, ("loss", 1), applied=False)


@pytest.mark.parametrize("worker", ["policy", "value"])
def test_windows_that_do_not_fail_have_the_bits_of_stock(worker, megatron_ranks):
    at = ("data", 0)
    patched = megatron_ranks(2, interrupted, None, at, worker)
    assert patched == megatron_ranks(2, interrupted, None, at, worker, applied=False)


def streamed(fail: tuple[str, int] | None, between: str, applied: bool = True) -> Outcome:
    """Runs on a rank: steps in two pieces each; one is aborted, or log-probs are taken inside of
    it."""
    nemo = start(applied=applied)
    for step in range(STEPS):
        if step == 1 and fail is not None:
            nemo.begin()
            nemo.chunk(77)
            del nemo.losses[-4:]
            nemo.failing(fail, lambda: nemo.chunk(78))
            nemo.worker.abort_train_step()
        nemo.begin()
        nemo.chunk(step)
        if between:
            nemo.worker.prepare_for_lp_inference(keep_train_buffers=between == "kept")
            nemo.logprobs(5)
            del nemo.losses[-4:]
            nemo.worker.prepare_for_training()
        nemo.chunk(step + 10)
        nemo.worker.finish_train_step()
    return nemo.outcome()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("site", ["data", "loss", "backward"])
def test_an_aborted_streamed_step_leaves_no_trace_in_later_steps(site, index, megatron_ranks):
    assert megatron_ranks(2, streamed, (site, index), "") == megatron_ranks(2, streamed, None, "")


def test_on_stock_the_streamed_step_after_an_aborted_one_trains_on_nothing(megatron_ranks):
    with pytest.raises(RankError, match="losses_reduced"):
        megatron_ranks(2, streamed, ("loss", 0), "", applied=False)


def test_logprobs_inside_of_a_streamed_step_change_nothing(megatron_ranks):
    assert megatron_ranks(2, streamed, None, "kept") == megatron_ranks(2, streamed, None, "")


def test_a_streamed_step_refuses_gradients_that_an_offload_has_dropped(megatron_ranks):
    stock = megatron_ranks(2, streamed, None, "offloaded", applied=False)
    assert stock != megatron_ranks(2, streamed, None, "", applied=False), (
        "stock loses them silently"
    )
    with pytest.raises(RankError, match="offload of their buffer has dropped"):
        megatron_ranks(2, streamed, None, "offloaded")


def exported(after_a_forward: bool, applied: bool = True) -> bytes:
    """Runs on a rank: the weights that go to the inference engine after a step."""
    nemo = start(applied=applied)
    nemo.train(0)
    if after_a_forward:
        nemo.logprobs(1)
    return nemo.exported()


def test_a_refit_right_after_a_step_sends_the_step(megatron_ranks):
    right = megatron_ranks(2, exported, True)
    assert right[0] == right[1]
    assert megatron_ranks(2, exported, False) == right
    stock = megatron_ranks(2, exported, False, applied=False)
    assert stock[0] != stock[1], "stock sends a mixture, another one from each replica"
