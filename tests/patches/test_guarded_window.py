"""A window that fails on one rank ends on all of them, and the next one is exact."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import pickle

import pytest
import torch.distributed as dist
from guard_failures import Broken, failing, guard, unguard
from ranks import VIRTUAL, built, on_microbatch, on_ranks, same

from megatron_idempotent import WindowAborted
from megatron_idempotent.window import agree

pytestmark = [pytest.mark.full, pytest.mark.patched]

PIPELINE_SITES = ("data", "layer@1", "loss", "backward@0", "backward@1")
DATA_PARALLEL_SITES = (
    *("data", "layer@0", "loss", "backward@0", "backward@1"),
    *("dispatch@0", "dispatch@-1"),
)
EXHAUSTIVE = pytest.mark.exhaustive


def _fail_each(layout, cases, microbatches, *, first_window=False, windows_before=2):
    """Each case (site, rank, index): aborted on all ranks, then a window with the exact bits."""
    reference = built(**layout)
    expected = reference.forward_backward(microbatches, data_seed=1)
    model = None
    for site, rank, index in cases:
        if first_window or model is None:
            unguard()
            model = built(**layout)
            guard(model)
            if not first_window:
                # From the second on, backward hooks start the reductions.
                for _ in range(windows_before):
                    model.forward_backward(microbatches, data_seed=1)
                assert same(model, reference), "guarded, without a failure"
        here = dist.get_rank() == rank
        with failing(model, site, index, here), pytest.raises(WindowAborted) as aborted:
            model.forward_backward(microbatches, data_seed=2)
        assert list(aborted.value.failures) == [rank], (site, rank, index, aborted.value)
        assert isinstance(aborted.value.__cause__, Broken) == here
        assert model.forward_backward(microbatches, data_seed=1) == expected, (site, rank, index)
        assert same(model, reference), (site, rank, index)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2, timeout_s=300)
def test_a_failure_in_any_microbatch_of_any_stage_leaves_the_pipeline_clean(overlap):
    cases = list(itertools.product(PIPELINE_SITES, (0, 1), range(3)))
    cases = [case for case in cases if case[0] != "loss" or case[1] == 1]
    _fail_each({"pp": 2, "overlap_grad_reduce": overlap}, cases, 3)


@pytest.mark.exhaustive
@on_ranks(2, timeout_s=300)
def test_a_failure_in_any_chunk_of_an_interleaved_pipeline_leaves_it_clean():
    cases = list(itertools.product(("data", "backward@0"), (0, 1), range(4)))
    cases += [("loss", 1, 0), ("loss", 1, 1), ("layer@0", 0, 2), ("layer@0", 1, 3)]
    _fail_each(VIRTUAL, cases, 2)


@pytest.mark.parametrize(
    ("overlap", "distributed_optimizer"),
    [(True, True), (False, False), *(pytest.param(*b, marks=EXHAUSTIVE) for b in [(0, 1), (1, 0)])],
)
@on_ranks(2, timeout_s=300)
def test_a_failure_on_one_data_parallel_rank_leaves_no_peer_waiting(overlap, distributed_optimizer):
    layout = {
        "overlap_grad_reduce": bool(overlap),
        "overlap_param_gather": bool(overlap and distributed_optimizer),
        "distributed_optimizer": bool(distributed_optimizer),
    }
    cases = list(itertools.product(DATA_PARALLEL_SITES, (1,), range(2)))
    # Reductions start once per window, from hooks only with overlap.
    cases = [c for c in cases if "dispatch" not in c[0] or (overlap and c[2] == 0)]
    _fail_each(layout, cases, 2)


@on_ranks(2, timeout_s=300)
def test_a_failure_in_the_first_window_leaves_no_peer_waiting():
    cases = [(site, 1, 1) for site in DATA_PARALLEL_SITES if "dispatch" not in site]
    _fail_each({"overlap_param_gather": True}, cases, 2, first_window=True)


@pytest.mark.parametrize("windows_before", [1, 2])
@on_ranks(2, timeout_s=300)
def test_reductions_are_started_in_the_peers_order_where_buckets_have_another(windows_before):
    # One bucket per parameter: a layer's output projection is registered before its input's.
    layout = {"ddp_overrides": {"bucket_size": 1}}
    cases = [("backward@1", 1, 1), ("data", 1, 1), ("backward@0", 1, 1)]
    _fail_each(layout, cases, 2, windows_before=windows_before)


@on_ranks(4, timeout_s=300)
def test_experts_and_two_replicas_of_two_stages_are_carried():
    layout = {"pp": 2, "experts": 2, "overlap_param_gather": True}
    cases = [("data", 0, 2), ("backward@1", 1, 2), ("layer@0", 2, 0), ("loss", 3, 1)]
    _fail_each(layout, cases, 3)


@on_ranks(2)
def test_a_failure_in_a_call_that_reduces_nothing_starts_no_reduction():
    """Steps of two calls that are finalized by hand; rank 1 fails in either of them.

    The peers' hooks wait for the registrations of both calls.
    """
    from megatron.core.distributed import finalize_model_grads

    model = built()
    model.config.finalize_model_grads_func = None
    (chunk,) = model.chunks
    learns = hasattr(chunk.bucket_groups[0], "is_first_batch")  # else one call registers, not both

    def call(number: int) -> None:
        with contextlib.nullcontext() if learns or number else chunk.no_sync():
            model.forward_backward(2, data_seed=number, zero_first=False)

    def step():
        chunk.zero_grad_buffer()
        call(0)
        call(1)
        finalize_model_grads(model.chunks)
        return model.gradients()

    expected = step()
    guard(model)
    assert same(step(), expected)
    for fails in (0, 1):
        chunk.zero_grad_buffer()
        for number in range(fails):
            call(number)
        with failing(model, "backward@0", 1, dist.get_rank() == 1), pytest.raises(WindowAborted):
            call(fails)
        assert [same(step(), expected) for _ in range(2)] == [True, True]


# What the guard costs, what it finds before the reduction, and what it refuses.


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}], ids=["dp", "pp", "tp"])
@on_ranks(2)
def test_a_guarded_window_costs_one_collective_and_changes_no_bit(layout):
    from megatron.core.pipeline_parallel import schedules

    from megatron_idempotent.proof.cpu.probes import watching_collectives

    model = built(**layout)
    guard(model)
    model.forward_backward(2, data_seed=0)
    steps = schedules.forward_step, schedules.backward_step
    seen = []
    for change in (unguard, functools.partial(guard, model)):
        change()
        counts = collections.Counter()
        with watching_collectives(lambda name, _, counts=counts: counts.update([name])):
            losses = model.forward_backward(2, data_seed=1)
        seen.append((counts, losses, model.gradients()))
        assert (schedules.forward_step, schedules.backward_step) == steps
    (plain, losses, gradients), (guarded, same_losses, same_gradients) = seen
    assert losses == same_losses
    assert same(gradients, same_gradients)
    assert (dict(guarded - plain), dict(plain - guarded)) == ({"allreduce_": 1}, {})


@on_ranks(2)
def test_agree_raises_on_all_ranks_where_one_brings_an_error():
    agree()
    error = Broken("cannot pack") if dist.get_rank() == 1 else None
    with pytest.raises(WindowAborted, match="rank 1: Broken: cannot pack") as aborted:
        agree(error)
    assert aborted.value.__cause__ is error
    again = pickle.loads(pickle.dumps(aborted.value))
    assert (again.failures, str(again)) == ({1: "Broken: cannot pack"}, str(aborted.value))
    agree()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows_before", [0, 2])
@on_ranks(2)
def test_a_nan_that_upstream_finds_on_one_rank_is_raised_on_all(overlap, windows_before):
    nan = {"check_for_nan_in_grad": True}
    model = built(overlap_grad_reduce=overlap, ddp_overrides=nan)
    guard(model)
    for _ in range(windows_before):
        model.forward_backward(2, data_seed=1)
    bad = dist.get_rank() == 1

    def spoil(index, loss):
        return loss * float("nan") if bad and loss is not None else loss

    with on_microbatch(model, spoil), pytest.raises(WindowAborted) as aborted:
        model.forward_backward(2, data_seed=2)
    assert list(aborted.value.failures) == [1]
    assert "found NaN in local grad norm" in aborted.value.failures[1]
    model.forward_backward(2, data_seed=1)
    expected = built(overlap_grad_reduce=overlap)
    unguard()
    expected.forward_backward(2, data_seed=1)
    assert same(model, expected)


@on_ranks(2)
def test_a_failed_forward_only_pass_leaves_the_pipeline_clean_and_gradients_alone():
    model = built(pp=2)
    guard(model)
    model.forward_backward(3, data_seed=1)
    pending = model.gradients()
    losses = model.forward_backward(3, data_seed=2, forward_only=True)
    here = dist.get_rank() == 0
    with failing(model, "layer@1", 1, here), pytest.raises(WindowAborted):
        model.forward_backward(3, data_seed=2, forward_only=True)
    assert model.forward_backward(3, data_seed=2, forward_only=True) == losses
    assert same(model.gradients(), pending)


@on_ranks(1)
def test_a_foreign_schedule_and_a_bare_model_are_refused():
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.window import guarded_window

    model = built()
    with pytest.raises(ValueError, match="get_forward_backward_func"):
        guarded_window(failing, model=model.chunks)
    with pytest.raises(ValueError, match="GPTModel"):
        guarded_window(get_forward_backward_func(), model=[model.chunks[0].module])
