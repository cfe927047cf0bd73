"""A split step on FSDP2 with uneven data, and with state that a program has set or left."""

from __future__ import annotations

import pytest


def uneven(last):
    """Runs on a rank: rank 1 gets less than rank 0, or nothing; as if it had masked rows
    instead."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from scenario import ROWS, TokenLoss, cut, data

    rank = torch.distributed.get_rank()
    loss = TokenLoss()
    sizes = [2, 1, 3]
    mine = [2, 1, 3] if rank == 0 else [0, 1, 1]
    pieces = list(cut(data(1, 12, rank), sizes))

    def run(short):
        parts = build()
        for block in parts[0].blocks:
            block.dropout.p = 0.0  # masked rows draw, and rows that are not there do not
        step = step_of(*parts)
        step_id = step.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
        receipts = []
        for index, (piece, number) in enumerate(zip(pieces, mine, strict=True)):
            rows = number * ROWS
            if short:
                piece = {name: value[:rows] for name, value in piece.items()} if rows else None
            else:
                piece = {**piece, "sample_mask": piece["sample_mask"].clone()}
                piece["sample_mask"][rows:] = 0
            is_last = last and index == 2
            receipts.append(step.microbatch(step_id, piece, last=is_last).microbatches)
        return step.finish(step_id), receipts, state(*parts), parts

    want, _, after, _ = run(short=False)
    result, receipts, got, parts = run(short=True)
    assert receipts == mine
    assert result.microbatches == 8
    assert (result.metrics["nll"], result.grad_norm) == (want.metrics["nll"], want.grad_norm)
    forwards = [float(block.forwards) for block in parts[0].blocks]
    assert forwards == [float(sum(mine))] * 2
    # All but the buffers, which count the masked microbatches too, and the random state.
    return same(got[:-3], after[:-3])


@pytest.mark.parametrize("last", [False, True])
def test_ranks_with_less_data_send_zeros(megatron_ranks, last):
    assert megatron_ranks(2, uneven, last) == [True, True]


def early_finish():
    """Runs on a rank: rank 1 is done two batches before rank 0."""
    import torch
    from fsdp_bench import build, parameters, step_of
    from scenario import ROWS, TokenLoss, cut, data

    rank = torch.distributed.get_rank()
    step = step_of(*(parts := build()))
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    for piece in list(cut(data(1, 6, rank), [1, 1, 1]))[: 3 - 2 * rank]:
        step.microbatch(step_id, piece)
    random = torch.get_rng_state()
    result = step.finish(step_id)
    assert torch.equal(torch.get_rng_state(), random)  # zeros have been sent, and nothing drawn
    return result.microbatches, result.metrics, parameters(parts[0]).tolist()


def test_a_rank_that_finishes_early_goes_on_with_the_others(megatron_ranks):
    first, second = megatron_ranks(2, early_finish)
    assert first == second
    assert first[0] == 4


def nothing_valid():
    """Runs on a rank: a step of masked rows only, and one without any."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from scenario import ROWS, TokenLoss, data, split_step

    parts = build()
    step = step_of(*parts)
    batch = data(1, 4, torch.distributed.get_rank())
    batch["sample_mask"].zero_()
    before = state(*parts)[:-3]
    # With gradients that are reduced already.
    result = split_step(step, TokenLoss(), batch, [1, 1], last=True)
    assert (result.updated, result.grad_norm) == (False, None)
    assert "no valid token" in result.skipped
    assert all(parameter.grad is None for parameter in parts[0].parameters())
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    assert not step.finish(step_id).updated
    return same(state(*parts)[:-3], before)


def test_a_step_without_valid_rows_is_skipped(megatron_ranks):
    assert megatron_ranks(2, nothing_valid) == [True, True]


def settings_of_the_program():
    """Runs on a rank: what the program had set on the model is so again after a step, and an
    abort."""
    import torch
    from fsdp_bench import build, step_of
    from scenario import ROWS, TokenLoss, data, split_step

    parts = model, _, _ = build()
    groups = [m._get_fsdp_state()._fsdp_param_group for m in (model, *model.blocks)]
    context = model._get_fsdp_state()._state_ctx

    def settings():
        return [(g.reduce_grads, g.all_reduce_grads) for g in groups], context.is_last_backward

    model.set_requires_gradient_sync(False)
    model.blocks[0].set_requires_all_reduce(True)
    model.set_is_last_backward(False)
    model.blocks[1].eval()
    before, step = settings(), step_of(*parts)
    batch = data(1, 4, torch.distributed.get_rank())
    split_step(step, TokenLoss(), batch, [1, 1])
    assert settings() == before
    for parameter in model.parameters():
        parameter.grad = None
    model.blocks[1].eval()
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, batch)
    assert model.blocks[1].training
    assert context.is_last_backward  # or nothing would wait for the reduction
    step.abort()
    assert settings() == before
    assert not model.blocks[1].training


def test_settings_of_the_program_are_put_back(megatron_ranks):
    megatron_ranks(2, settings_of_the_program)


def leftovers(layout):
    """Runs on a rank: a step after a loop that was left in the middle of an accumulation."""
    import torch
    from fsdp_bench import Trip, Tripped, build, same, state, step_of
    from scenario import TokenLoss, data, split_step

    batch, loss = data(1, 4, torch.distributed.get_rank()), TokenLoss()
    parts = build(layout)
    split_step(step_of(*parts), loss, batch, [2])
    want = state(*parts)
    parts = build(layout)
    model = parts[0]
    random, trip = torch.get_rng_state(), Trip(*parts)
    model.set_requires_gradient_sync(False)
    model(batch["input_ids"]).sum().backward()
    trip.set(10)
    with pytest.raises(Tripped):
        model(batch["input_ids"]).sum().backward()
    trip.set(0)
    torch.set_rng_state(random)
    for block in model.blocks:
        block.forwards.zero_()
    split_step(step_of(*parts), loss, batch, [2])
    return same(state(*parts), want)


@pytest.mark.parametrize("layout", ["shard", "half precision"])
def test_begin_drops_what_a_loop_has_left(megatron_ranks, layout):
    assert megatron_ranks(2, leftovers, layout) == [True, True]


def different_batches():
    """Runs on a rank: the two ranks of replica 0 are given different numbers of rows."""
    import torch
    from fsdp_bench import build, step_of
    from scenario import ROWS, TokenLoss, data

    from megatron_idempotent import WindowAborted

    rank = torch.distributed.get_rank()
    step = step_of(*build("tensor parallel"), clip_grad=None)
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    with pytest.raises(WindowAborted, match="data-parallel rank 0 was given"):
        step.microbatch(step_id, data(1, 2 if rank == 1 else 4, rank // 2))
    step.microbatch(step_id, data(1, 4, rank // 2))
    return step.finish(step_id).microbatches


def test_tensor_parallel_ranks_with_different_batches_are_refused(megatron_ranks):
    assert megatron_ranks(4, different_batches) == [4] * 4
