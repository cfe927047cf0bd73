"""Stock megatron.training programs: the first train() works, the second fails as upstream does."""

import importlib.util
from pathlib import Path

import pytest

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

pytestmark = pytest.mark.skipif(
    not any(
        (Path(folder) / "training" / "training.py").exists()
        for folder in (importlib.util.find_spec("megatron") or object()).submodule_search_locations
    ),
    reason="this megatron-core release does not carry megatron.training",
)


def train_twice(extra_args, **layout):
    """(microbatch losses of the first call, whether parameters moved, the second's failure)."""
    from megatron_idempotent.proof.cpu import program

    running = program.start(extra_args, **layout)
    before = running.parameters()
    running.train(2)
    moved = bool((running.parameters() != before).any())
    losses = list(running.losses)
    failure = ""
    try:
        running.train(2)
    except AssertionError as error:
        failure = str(error)
    return losses, moved, failure


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="dp", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, id="pp", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "vpp": 2}, id="vpp", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "vpp": 2, "shared_config": True}, id="vpp-shared-config"),
    ],
)
def test_stock_train_runs_once_and_fails_again_as_upstream_does(megatron_ranks, layout):
    plain, overlapped, again = (
        megatron_ranks(2, train_twice, extra_args, **layout)
        for extra_args in ((), OVERLAP, OVERLAP)
    )
    for results, failure in (
        (plain, "timer has already been started"),
        (overlapped, "config.no_sync_func must be None"),
    ):
        assert len(results[-1][0]) == 8  # 2 iterations of 4 microbatches on the last stage
        assert all(moved for _, moved, _ in results)
        assert all(failure in found for _, _, found in results)
    losses = [[result[0] for result in results] for results in (plain, overlapped, again)]
    assert losses[0] == losses[1], "overlap changes no loss"
    assert losses[1] == losses[2], "a program can be repeated"


def test_context_parallel_programs_share_each_loss(megatron_ranks):
    results = megatron_ranks(2, train_twice, OVERLAP, cp=2)
    assert len(results[0][0]) == 8
    assert results[0][0] == results[1][0]
    assert all(moved for _, moved, _ in results)


def test_tensor_parallel_programs_run_with_sequence_parallelism(megatron_ranks):
    results = megatron_ranks(2, train_twice, ("--sequence-parallel", *OVERLAP), tp=2)
    assert results[0][0] == results[1][0]
