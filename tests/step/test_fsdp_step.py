"""What else a split step on FSDP2 promises: uneven data, reading, errors that name the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest


def uneven(last):
    """On a rank: rank 1 gets less than rank 0, or nothing; as if it had masked rows instead."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from split_bench import ROWS, TokenLoss, cut, data

    rank = torch.distributed.get_rank()
    loss = TokenLoss()
    sizes = [2, 1, 3]
    mine = [2, 1, 3] if rank == 0 else [0, 1, 1]
    pieces = list(cut(data(1, 12, rank), sizes))
    random = torch.get_rng_state()

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
        return state(*parts), step.finish(step_id), receipts, state(*parts), parts

    _, want, _, after, _ = run(short=False)
    begun, result, receipts, got, parts = run(short=True)
    assert receipts == mine
    assert result.microbatches == 8
    assert (result.metrics["nll"], result.grad_norm) == (want.metrics["nll"], want.grad_norm)
    assert same(begun[-1:], [torch.get_rng_state()])  # nothing was drawn, by ghosts neither
    forwards = [float(block.forwards) for block in parts[0].blocks]
    assert forwards == [float(sum(mine))] * 2
    del random
    # All but the buffers, which count the masked microbatches too, and the random state.
    return same(got[:-3], after[:-3])


@pytest.mark.parametrize("last", [False, True])
def test_ranks_with_less_data_send_zeros(megatron_ranks, last):
    assert megatron_ranks(2, uneven, last) == [True, True]


def early_finish():
    """On a rank: rank 1 is done two batches before rank 0."""
    import torch
    from fsdp_bench import build, parameters, step_of
    from split_bench import ROWS, TokenLoss, cut, data

    rank = torch.distributed.get_rank()
    step = step_of(*(parts := build()))
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    for piece in list(cut(data(1, 6, rank), [1, 1, 1]))[: 3 - 2 * rank]:
        step.microbatch(step_id, piece)
    result = step.finish(step_id)
    return result.microbatches, result.metrics, parameters(parts[0]).tolist()


def test_a_rank_that_finishes_early_goes_on_with_the_others(megatron_ranks):
    first, second = megatron_ranks(2, early_finish)
    assert first == second
    assert first[0] == 4


def nothing_valid():
    """On a rank: a step of masked rows only, and one without any."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from split_bench import ROWS, TokenLoss, data, split_step

    parts = build()
    step = step_of(*parts)
    batch = data(1, 4, torch.distributed.get_rank())
    batch["sample_mask"].zero_()
    before = state(*parts)[:-3]
    result = split_step(step, TokenLoss(), batch, [1, 1])
    assert (result.updated, result.grad_norm) == (False, None)
    assert "no valid token" in result.skipped
    assert all(parameter.grad is None for parameter in parts[0].parameters())
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    assert not step.finish(step_id).updated
    return same(state(*parts)[:-3], before)


def test_a_step_without_valid_rows_is_skipped(megatron_ranks):
    assert megatron_ranks(2, nothing_valid) == [True, True]


def reading(last):
    """On a rank: log-probs, export and a failed evaluation after every piece."""
    import torch
    from fsdp_bench import Trip, Tripped, build, parameters, same, state, step_of
    from split_bench import TokenLoss, data, split_step
    from torch.distributed.tensor import DTensor

    rank = torch.distributed.get_rank()
    batch, loss = data(1, 8, rank), TokenLoss()
    logprobs = []

    def run(between=None):
        parts = build()
        step, trip = step_of(*parts), Trip(*parts)
        for _ in range(2):
            split_step(
                step,
                loss,
                batch,
                [1, 2, 1],
                last=last,
                between=between and (lambda _: between(step, trip)),
            )
        if between is not None:
            between(step, trip)
        return state(*parts), [parameter.grad.to_local() for parameter in parts[0].parameters()]

    def look(step, trip):
        with step.reading() as [model]:
            assert not any(module.training for module in model.modules())
            named = dict(model.named_parameters())
            assert all(isinstance(parameter, DTensor) for parameter in named.values())
            whole = parameters(model)
            logprobs.append((model(batch["input_ids"]).sum().item(), whole))
            assert not torch.is_grad_enabled()
        trip.set(2)
        with pytest.raises(Tripped), step.reading() as [model]:
            model(batch["input_ids"])
        trip.set(0)

    want, got = run(), run(look)
    assert same(want[1], got[1])
    # Between two updates all of them see the same parameters, and after one others.
    values = [value for value, _ in logprobs]
    assert len(set(values[:3])) == len(set(values[3:6])) == 1
    assert len({values[0], values[3], values[6]}) == 3
    assert torch.equal(logprobs[6][1], want[0][0])
    return same(want[0], got[0])


@pytest.mark.parametrize("last", [False, True])
def test_reading_disturbs_nothing(megatron_ranks, last):
    assert megatron_ranks(2, reading, last) == [True, True]


def evaluated_outside():
    """On a rank: a program evaluates without reading() before the update, and is not one behind."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from split_bench import TokenLoss, data, split_step

    batch, loss = data(1, 4, torch.distributed.get_rank()), TokenLoss()

    def run(between):
        parts = build()
        step = step_of(*parts)
        for _ in range(3):
            split_step(step, loss, batch, [2], last=True, between=between and between(parts[0]))
        return state(*parts)

    def evaluation(model):
        def evaluate(_):
            random = torch.get_rng_state()
            model.eval()
            with torch.no_grad():
                model(batch["input_ids"])
            torch.set_rng_state(random)

        return evaluate

    return same(run(evaluation), run(None))


def test_an_evaluation_before_the_update_leaves_no_old_parameters(megatron_ranks):
    assert megatron_ranks(2, evaluated_outside) == [True, True]


def settings_of_the_program():
    """On a rank: what the program had set on the model is so again after a step, and an abort."""
    import torch
    from fsdp_bench import build, step_of
    from split_bench import ROWS, TokenLoss, data, split_step

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
    step.abort()
    assert settings() == before
    assert not model.blocks[1].training


def test_settings_of_the_program_are_put_back(megatron_ranks):
    megatron_ranks(2, settings_of_the_program)


def leftovers():
    """On a rank: a step after a loop that was left in the middle of an accumulation."""
    import torch
    from fsdp_bench import Trip, Tripped, build, same, state, step_of
    from split_bench import TokenLoss, data, split_step

    batch, loss = data(1, 4, torch.distributed.get_rank()), TokenLoss()
    parts = build()
    split_step(step_of(*parts), loss, batch, [2])
    want = state(*parts)
    parts = build()
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


def test_begin_drops_what_a_loop_has_left(megatron_ranks):
    assert megatron_ranks(2, leftovers) == [True, True]


def forwards_that_are_refused():
    """On a rank: a forward for training, and another step, while one is open."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from split_bench import ROWS, TokenLoss, data, split_step

    batch, loss = data(1, 4, torch.distributed.get_rank()), TokenLoss()
    parts = build()
    split_step(step_of(*parts), loss, batch, [1, 1])
    want = state(*parts)
    model, _, _ = parts = build()
    step, other = step_of(*parts), step_of(*parts)

    def between(_):
        with pytest.raises(RuntimeError, match=r"use step\.microbatch|Use step\.microbatch"):
            model(batch["input_ids"])
        with pytest.raises(RuntimeError, match="another FSDPTrainStep is open"):
            other.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
        assert other.open_step_id is None

    split_step(step, loss, batch, [1, 1], between=between)
    model(batch["input_ids"]).sum().backward()
    other.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
    return same(state(*parts)[:1], want[:1])


def test_an_open_step_refuses_other_training(megatron_ranks):
    assert megatron_ranks(2, forwards_that_are_refused) == [True, True]


def bad_arguments():
    """On a rank: what the constructor says no to, and weights that were swapped under a step."""
    import torch
    from fsdp_bench import Model, build, step_of
    from split_bench import ROWS, TokenLoss, data
    from torch.distributed.fsdp import fully_shard

    from megatron_idempotent import FSDPTrainStep

    model, optimizer, scheduler = build()
    plain = Model()
    with pytest.raises(ValueError, match="Model that is not fully sharded: apply"):
        FSDPTrainStep(plain, optimizer)
    early = torch.optim.SGD(plain.parameters())
    partly = set(plain.head.parameters())
    fully_shard(plain, ignored_params=partly)
    with pytest.raises(ValueError, match=r"2 parameters that are not sharded.*'head\.weight'"):
        FSDPTrainStep(plain, early)
    plain.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"of which 13 parameters are not.*\(128, 16\).*after"):
        FSDPTrainStep(plain, early)
    with pytest.raises(ValueError, match="got a NoneType as optimizer"):
        FSDPTrainStep(model, None)
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match="clip_grad must be positive or None, got"):
            FSDPTrainStep(model, optimizer, clip_grad=wrong)
    step = step_of(model, optimizer, scheduler)
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, data(1, 2, torch.distributed.get_rank()))
    with torch.no_grad():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    with pytest.raises(RuntimeError, match="15 of the optimizer's parameters are not the model's"):
        step.finish(step_id)
    step.abort()
    with pytest.raises(ValueError, match="part of a larger sharded model: pass that"):
        FSDPTrainStep(model.blocks[0], torch.optim.SGD(model.blocks[0].parameters()))


def test_bad_arguments_are_errors_that_name_the_remedy(megatron_ranks):
    megatron_ranks(2, bad_arguments)


def test_megatron_is_not_imported():
    program = (
        "import sys; from megatron_idempotent import FSDPTrainStep; "
        "print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
