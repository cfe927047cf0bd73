"""`DistributedDataParallel.no_sync` nests, and an exit from a dead window does nothing."""

from __future__ import annotations

import copy
import gc

import pytest


def armed(chunk) -> set[bool]:
    return {group.is_last_microbatch for group in chunk.bucket_groups}


def build(**options):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(strict=True)
    model = tiny.build(distributed_optimizer=False, with_optimizer=False, **options)
    return model, model.chunks[0]


def nesting() -> list[set[bool]]:
    """Runs on a rank: whether synchronisation is on, step by step through nested contexts."""
    _, chunk = build()
    seen = [armed(chunk)]
    with chunk.no_sync():
        with chunk.no_sync():
            seen.append(armed(chunk))
        seen.append(armed(chunk))
    seen.append(armed(chunk))
    return seen


def test_the_outermost_exit_turns_synchronisation_on(megatron_ranks):
    for seen in megatron_ranks(1, nesting):
        assert seen == [{True}, {False}, {False}, {True}]


def dispatches_in_a_held_window() -> tuple[list[int], list[int]]:
    """Runs on a rank: microbatches in which reductions started, without and with an outer
    no_sync."""
    model, chunk = build()
    model.config.finalize_model_grads_func = None
    started: list[int] = []
    at = -1

    def on_microbatch(index, loss):
        nonlocal at
        at = index % 3

    model.on_microbatch = on_microbatch
    for group in chunk.bucket_groups:
        start = group.start_grad_sync
        group.start_grad_sync = lambda *a, start=start, **k: (started.append(at), start(*a, **k))
    model.forward_backward(3, data_seed=0)
    chunk.finish_grad_sync()
    model.forward_backward(3, data_seed=0)
    chunk.finish_grad_sync()
    alone, started[:] = list(started), []
    chunk.zero_grad_buffer()
    with chunk.no_sync():
        model.forward_backward(3, data_seed=1, zero_first=False)
        held = list(started)
    return alone, held


def test_a_schedule_inside_of_no_sync_starts_no_reduction(megatron_ranks):
    for alone, held in megatron_ranks(2, dispatches_in_a_held_window):
        assert set(alone) == {2}
        assert held == []


def kept_exception(applied: bool) -> tuple[set[int], str, bool]:
    """Runs on a rank: microbatches that reduced while an old exception was freed in the second
    one."""
    from megatron.core.pipeline_parallel import schedules

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(strict=True)

    def fresh():
        model = tiny.build(distributed_optimizer=False, with_optimizer=False)
        # The schedule that enters no_sync by hand, on a pipeline of one stage.
        model.config.deallocate_pipeline_outputs = False
        return model

    def window(model, seed):
        return with_schedule(model, schedules, seed)

    model = fresh()
    (chunk,) = model.chunks
    for seed in range(2):
        window(model, seed)
    kept = []

    def fail(index, loss):
        raise ValueError("bad sample")

    model.on_microbatch = fail
    try:
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

    model.on_microbatch = release
    outcome = "ok"
    try:
        window(model, 3)
    except AssertionError as error:
        outcome = str(error)
    reference = fresh()
    window(reference, 3)
    import torch

    return seen, outcome, torch.equal(model.gradients(), reference.gradients())


def with_schedule(model, schedules, seed: int):
    from megatron.core import pipeline_parallel

    chosen = pipeline_parallel.get_forward_backward_func
    pipeline_parallel.get_forward_backward_func = lambda *a, **k: (
        schedules.forward_backward_pipelining_without_interleaving
    )
    try:
        return model.forward_backward(4, data_seed=seed)
    finally:
        pipeline_parallel.get_forward_backward_func = chosen


def test_an_exception_freed_in_a_later_window_does_not_end_its_no_sync(megatron_ranks):
    for seen, outcome, right in megatron_ranks(2, kept_exception, True):
        assert (seen, outcome, right) == ({False}, "ok", True)


def test_on_stock_an_exception_freed_in_a_later_window_ends_its_no_sync(megatron_ranks):
    for seen, outcome, right in megatron_ranks(2, kept_exception, False):
        assert True in seen
        assert outcome == "Cannot set grad twice" or not right


def dropped_and_copied() -> list[set[bool]]:
    """Runs on a rank: a context that is dropped, a config copied with no_sync in it, a
    decorator."""
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
    seen.append(armed(chunk))
    return seen


def test_a_dropped_context_is_left_and_no_sync_stays_a_bound_method(megatron_ranks):
    for seen in megatron_ranks(1, dropped_and_copied):
        assert seen == [{False}, {True}, {False}, {False}, {True}]


def entered_twice() -> None:
    """Runs on a rank: one context object, entered again before its exit."""
    _, chunk = build()
    context = chunk.no_sync()
    with context, pytest.raises(RuntimeError, match="entered twice"), context:
        pass
    assert armed(chunk) == {True}


def test_entering_one_context_twice_raises(megatron_ranks):
    megatron_ranks(1, entered_twice)


def after_forward_only() -> tuple[set[bool], bool]:
    """Runs on a rank of a pipeline; returns the flag after a forward-only pass, and the next
    window."""
    import torch

    model, chunk = build(pp=2)
    model.forward_backward(4, data_seed=0)
    chunk.zero_grad_buffer()
    model.forward_backward(4, data_seed=1, forward_only=True)
    left = armed(chunk)
    model.forward_backward(4, data_seed=2, zero_first=False)
    mine = model.gradients()
    model.forward_backward(4, data_seed=2)
    return left, torch.equal(mine, model.gradients())


def test_a_forward_only_pass_between_zeroing_and_the_window_changes_nothing(megatron_ranks):
    for left, same in megatron_ranks(2, after_forward_only):
        assert left == {True}
        assert same
