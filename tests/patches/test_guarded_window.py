"""A window that fails on one rank ends on all of them, and the next one is exact."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from guard_failures import Broken, build, failing, guard, unguard

PIPELINE_SITES = ("data", "layer@1", "loss", "backward@0", "backward@1")
DATA_PARALLEL_SITES = (
    "data",
    "layer@0",
    "loss",
    "backward@0",
    "backward@1",
    "dispatch@0",
    "dispatch@-1",
)


def _fail_each(layout, cases, microbatches, first_window=False, windows_before=2):
    """Each case (site, rank, index): aborted on all ranks, then a window with the exact bits."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent.window.agreement import WindowAborted

    reference = build(**layout)
    expected = [reference.forward_backward(microbatches, data_seed=1), reference.gradients()]
    model = None
    for site, rank, index in cases:
        if first_window or model is None:
            unguard()
            model = build(**layout)
            guard(model)
            if not first_window:
                # From the second on, backward hooks start the reductions.
                for _ in range(windows_before):
                    model.forward_backward(microbatches, data_seed=1)
                assert torch.equal(model.gradients(), expected[1]), "guarded, without a failure"
        here = dist.get_rank() == rank
        with failing(model, site, index, here), pytest.raises(WindowAborted) as aborted:
            model.forward_backward(microbatches, data_seed=2)
        assert list(aborted.value.failures) == [rank], (site, rank, index, aborted.value)
        assert isinstance(aborted.value.__cause__, Broken) == here
        losses = model.forward_backward(microbatches, data_seed=1)
        assert losses == expected[0], (site, rank, index)
        assert torch.equal(model.gradients(), expected[1]), (site, rank, index)
    return len(cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_in_any_microbatch_of_any_stage_leaves_the_pipeline_clean(
    overlap, megatron_ranks
):
    cases = list(itertools.product(PIPELINE_SITES, (0, 1), range(3)))
    cases = [case for case in cases if case[0] != "loss" or case[1] == 1]
    layout = {"pp": 2, "overlap_grad_reduce": overlap}
    assert megatron_ranks(2, _fail_each, layout, cases, 3, timeout_s=300) == [len(cases)] * 2


@pytest.mark.exhaustive
def test_a_failure_in_any_chunk_of_an_interleaved_pipeline_leaves_it_clean(megatron_ranks):
    cases = list(itertools.product(("data", "backward@0"), (0, 1), range(4)))
    cases += [("loss", 1, 0), ("loss", 1, 1), ("layer@0", 0, 2), ("layer@0", 1, 3)]
    layout = {"pp": 2, "vpp": 2, "layers_per_stage": 1}
    assert megatron_ranks(2, _fail_each, layout, cases, 2, timeout_s=300) == [len(cases)] * 2


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_on_one_data_parallel_rank_leaves_no_peer_waiting(
    overlap, distributed_optimizer, megatron_ranks
):
    layout = {
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and distributed_optimizer,
        "distributed_optimizer": distributed_optimizer,
    }
    cases = list(itertools.product(DATA_PARALLEL_SITES, (1,), range(2)))
    # Reductions start once per window, from hooks only with overlap.
    cases = [c for c in cases if "dispatch" not in c[0] or (overlap and c[2] == 0)]
    assert megatron_ranks(2, _fail_each, layout, cases, 2, timeout_s=300) == [len(cases)] * 2


def test_a_failure_in_the_first_window_leaves_no_peer_waiting(megatron_ranks):
    layout = {"overlap_param_gather": True}
    cases = [(site, 1, 1) for site in DATA_PARALLEL_SITES if "dispatch" not in site]
    assert megatron_ranks(2, _fail_each, layout, cases, 2, True, timeout_s=300) == [len(cases)] * 2


@pytest.mark.parametrize("windows_before", [1, 2])
def test_reductions_are_started_in_the_peers_order_where_buckets_have_another(
    windows_before, megatron_ranks
):
    # One bucket per parameter: a layer's output projection is registered before its input's.
    layout = {"ddp_overrides": {"bucket_size": 1}}
    cases = [("backward@1", 1, 1), ("data", 1, 1), ("backward@0", 1, 1)]
    done = megatron_ranks(2, _fail_each, layout, cases, 2, False, windows_before, timeout_s=300)
    assert done == [len(cases)] * 2


def test_experts_and_two_replicas_of_two_stages_are_carried(megatron_ranks):
    layout = {"pp": 2, "experts": 2, "overlap_param_gather": True}
    cases = [("data", 0, 2), ("backward@1", 1, 2), ("layer@0", 2, 0), ("loss", 3, 1)]
    done = megatron_ranks(4, _fail_each, layout, cases, 3, timeout_s=300)
    assert done == [len(cases)] * 4


def fail_in_one_of_two_calls() -> list[bool]:
    """Runs on a rank: steps of two calls that are finalized by hand; rank 1 fails in either of
    them."""
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads

    from megatron_idempotent.window.agreement import WindowAborted

    model = build()
    model.config.finalize_model_grads_func = None
    (chunk,) = model.chunks
    learns = hasattr(chunk.bucket_groups[0], "is_first_batch")  # else one call registers, not both

    def call(number: int) -> None:
        with contextlib.nullcontext() if learns or number else chunk.no_sync():
            model.forward_backward(2, data_seed=number, zero_first=False)

    def step() -> torch.Tensor:
        chunk.zero_grad_buffer()
        call(0)
        call(1)
        finalize_model_grads(model.chunks)
        return model.gradients()

    expected = step()
    guard(model)
    same = [torch.equal(step(), expected)]
    for fails in (0, 1):
        chunk.zero_grad_buffer()
        for number in range(fails):
            call(number)
        with failing(model, "backward@0", 1, dist.get_rank() == 1), pytest.raises(WindowAborted):
            call(fails)
        same += [torch.equal(step(), expected) for _ in range(2)]
    return same


def test_a_failure_in_a_call_that_reduces_nothing_starts_no_reduction(megatron_ranks):
    # The peers' hooks wait for the registrations of both calls.
    assert megatron_ranks(2, fail_in_one_of_two_calls) == [[True] * 5] * 2
