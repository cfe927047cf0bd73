"""State that `abort_window` puts back where no patch is applied, and state that it leaves alone."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from abort_sites import Interrupted
from benches import abort

from megatron_idempotent.proof.cpu import RankError


def between_two_steps(times: int) -> list[str]:
    """Runs on a rank: digests of all values after a step and `times` aborts, and one window
    later."""
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(overlap_param_gather=True)
    for _ in range(2):
        model.forward_backward(2, data_seed=0)
        model.step()
    for _ in range(times):
        abort(model)
    state = [
        value
        for each in model.optimizer.chained_optimizers[0].optimizer.state.values()
        for value in each.values()
    ]
    before = model.parameters()
    model.forward_backward(2, data_seed=1)
    values = (*state, before, model.gradients(), model.parameters())
    return [hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in values]


def test_between_two_steps_it_changes_no_value_however_often(megatron_ranks):
    none, once, twice = (megatron_ranks(2, between_two_steps, times) for times in (0, 1, 2))
    assert none == once == twice


def no_sync_held_by_a_traceback() -> bool:
    """Runs on a rank: whether synchronisation is off in a window while a dead one's exit comes."""
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build()
    (chunk,) = model.chunks
    held = [chunk.no_sync()]
    held[0].__enter__()  # as the pipeline schedules do, and an exception leaves it like this
    abort(model)
    with chunk.no_sync():
        held.clear()
        return not any(group.is_last_microbatch for group in chunk.bucket_groups)


def test_a_no_sync_that_a_traceback_holds_is_left_for_good(megatron_ranks):
    assert all(megatron_ranks(1, no_sync_held_by_a_traceback))


def coalescing_held_by_a_traceback(at: str, after: str) -> tuple[float, int]:
    """Runs on a rank: a sum over the ranks after a reduction was interrupted as it was put
    together."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(distributed_optimizer=False)
    held = []

    class Coalescing:
        """Stands for a KeyboardInterrupt that upstream's context is entered or left upon."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            held.append(coalescing(*args, **kwargs))

        def __enter__(self) -> Any:
            if at == "enter":
                raise Interrupted
            return held[-1].__enter__()

        def __exit__(self, *_: Any) -> None:
            raise Interrupted

    coalescing = param_and_grad_buffer._coalescing_manager
    param_and_grad_buffer._coalescing_manager = Coalescing
    with pytest.raises(Interrupted):
        model.forward_backward(1, data_seed=0)
    param_and_grad_buffer._coalescing_manager = coalescing
    if after == "abort_window":
        abort(model)
    else:
        megatron_idempotent.window.rebuild_process_groups(model.chunks, model.optimizer)
    one = torch.ones(1)
    dist.all_reduce(one, group=parallel_state.get_data_parallel_group())
    model.forward_backward(1, data_seed=0)
    return float(one), len(held)


@pytest.mark.parametrize("after", ["abort_window", "rebuild_process_groups"])
@pytest.mark.parametrize("at", ["enter", "exit"])
def test_later_sums_are_not_added_to_an_interrupted_reduction(megatron_ranks, at, after):
    assert megatron_ranks(2, coalescing_held_by_a_traceback, at, after) == [(2.0, 1)] * 2


def gathers_in_flight() -> tuple[int, int]:
    """Runs on a rank: gathers in flight after a forward was interrupted, and after the abort."""
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(overlap_param_gather=True)
    (chunk,) = model.chunks

    def interrupt(*_: Any) -> None:
        raise Interrupted

    hook = chunk.module.decoder.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        model.forward_backward(1, data_seed=0)
    hook.remove()

    def flying() -> int:
        return sum(group.param_gather_handle is not None for group in chunk.bucket_groups)

    before = flying()
    abort(model)
    after = flying()
    chunk.start_param_sync()  # asserts that nothing is under way
    return before, after


def test_gathers_in_flight_end(megatron_ranks):
    for before, after in megatron_ranks(2, gathers_in_flight):
        assert before > 0
        assert after == 0


def bad_input(which: str) -> None:
    """Runs on a rank: a call with something that is no chunk or no optimizer."""
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build()
    (chunk,) = model.chunks
    calls = {
        "one chunk": (chunk, None),
        "none": ([], None),
        "inside": ([chunk, chunk.module], None),
        "optimizer": ([chunk], torch.optim.SGD(chunk.parameters(), lr=0.1)),
    }
    chunk.bucket_groups[0].is_last_microbatch = False
    try:
        megatron_idempotent.abort_window(*calls[which])
    finally:
        assert not chunk.bucket_groups[0].is_last_microbatch, "nothing is changed on bad input"


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("one chunk", "got a DistributedDataParallel: pass the list"),
        ("none", "got no model chunk"),
        ("inside", "got a GPTModel, which has no bucket groups"),
        ("optimizer", "got a SGD as optimizer, which has no step_with_ready_grads"),
    ],
)
def test_bad_input_is_refused_before_anything_is_changed(megatron_ranks, which, message):
    with pytest.raises(RankError, match=message):
        megatron_ranks(1, bad_input, which)


def zeroed_under_a_reduction() -> float:
    """Runs on a rank: what a reduction leaves in the gradients that a peer starts late."""
    import time

    import torch.distributed as dist

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=["reduction-outlives-its-window"])
    model = tiny.build(distributed_optimizer=False)
    (chunk,) = model.chunks
    for buffer in chunk.buffers:
        buffer.grad_data.fill_(1.0)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    for group in chunk.bucket_groups:
        group.start_grad_sync()
    chunk.zero_grad_buffer()
    dist.barrier()
    time.sleep(0.5)  # for what would still be written
    return float(model.gradients().abs().sum())


def test_zeroing_waits_for_a_reduction_that_a_peer_has_not_started(megatron_ranks):
    assert megatron_ranks(2, zeroed_under_a_reduction) == [0.0, 0.0]
