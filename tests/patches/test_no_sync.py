"""`DistributedDataParallel.no_sync` nests, and an exit from a dead window does nothing."""

from __future__ import annotations

import copy
import gc

import pytest
from ranks import built, fails, on_microbatch, on_ranks, same

pytestmark = pytest.mark.full


def armed(chunk) -> set[bool]:
    return {group.is_last_microbatch for group in chunk.bucket_groups}


def build(**options):
    model = built(distributed_optimizer=False, with_optimizer=False, **options)
    return model, model.chunks[0]


@on_ranks(2)
def test_a_schedule_inside_of_no_sync_starts_no_reduction():
    model, chunk = build()
    model.config.finalize_model_grads_func = None
    started: list[int] = []
    at = [-1]
    for group in chunk.bucket_groups:
        start = group.start_grad_sync
        group.start_grad_sync = lambda *a, start=start, **k: (started.append(at[0]), start(*a, **k))
    with on_microbatch(model, lambda index, loss: at.__setitem__(0, index % 3)):
        for _ in range(2):
            model.forward_backward(3, data_seed=0)
            chunk.finish_grad_sync()
        assert set(started) == {2}
        started.clear()
        chunk.zero_grad_buffer()
        with chunk.no_sync():
            model.forward_backward(3, data_seed=1, zero_first=False)
            assert started == []


@pytest.mark.parametrize("applied", [True, False])
@on_ranks(2)
def test_an_exception_freed_in_a_later_window_ends_its_no_sync_on_stock_only(applied):
    """An old exception is freed in the second microbatch of a window."""
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    chosen = pipeline_parallel.get_forward_backward_func

    def window(model, seed):
        pipeline_parallel.get_forward_backward_func = lambda *a, **k: (
            schedules.forward_backward_pipelining_without_interleaving
        )
        try:
            return model.forward_backward(4, data_seed=seed)
        finally:
            pipeline_parallel.get_forward_backward_func = chosen

    model, chunk = build(applied=applied)
    reference, _ = build(applied=applied)
    for each in (model, reference):
        # The schedule that enters no_sync by hand, on a pipeline of one stage.
        each.config.deallocate_pipeline_outputs = False
    for seed in range(2):
        window(model, seed)
    kept = []
    try:
        with on_microbatch(model, fails(ValueError("bad sample"))):
            window(model, 2)
    except ValueError as error:
        kept.append(error)
    seen: set[bool] = set()
    at = [0]

    def release(index, loss):
        if loss is None:
            at[0] += 1
            if at[0] == 2:
                kept.clear()
                gc.collect()
        if at[0] < 4:
            seen.update(armed(chunk))

    outcome = "ok"
    with on_microbatch(model, release):
        try:
            window(model, 3)
        except AssertionError as error:
            outcome = str(error)
    window(reference, 3)
    if applied:
        assert (seen, outcome, same(model, reference)) == ({False}, "ok", True)
    else:
        assert True in seen
        assert outcome == "Cannot set grad twice" or not same(model, reference)


@on_ranks(1)
def test_a_dropped_context_is_left_and_no_sync_stays_a_bound_method():
    """A context that is dropped, a config copied with no_sync in it, a decorator."""
    model, chunk = build()
    seen = []
    context = chunk.no_sync()
    context.__enter__()
    seen.append(armed(chunk))
    del context
    seen.append(armed(chunk))
    assert model.config.no_sync_func == chunk.no_sync
    assert model.config.no_sync_func.__self__ is chunk
    assert copy.copy(model.config).no_sync_func == chunk.no_sync

    @chunk.no_sync()
    def held():
        seen.append(armed(chunk))

    held()
    held()
    assert [*seen, armed(chunk)] == [{False}, {True}, {False}, {False}, {True}]


@on_ranks(1)
def test_entering_one_context_twice_raises():
    _, chunk = build()
    context = chunk.no_sync()
    with context, pytest.raises(RuntimeError, match="twice"), context:
        pass
    assert armed(chunk) == {True}


@on_ranks(2)
def test_a_forward_only_pass_between_zeroing_and_the_window_changes_nothing():
    model, chunk = build(pp=2)
    model.forward_backward(4, data_seed=0)
    chunk.zero_grad_buffer()
    model.forward_backward(4, data_seed=1, forward_only=True)
    assert armed(chunk) == {True}
    model.forward_backward(4, data_seed=2, zero_first=False)
    mine = model.gradients()
    model.forward_backward(4, data_seed=2)
    assert same(mine, model.gradients())
