"""A step is begun, fed and ended once per id; anything else is an error that changes nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest


def _raised(error, call, *args, **kwargs):
    from scenario import raised_by

    raised = raised_by(call, *args, **kwargs)
    assert isinstance(raised, error), raised
    return str(raised)


def calls_out_of_order(engine: str) -> None:
    """Runs on a rank: every call that has no open step, or has one already."""
    from scenario import ROWS, Bench, TokenLoss, data

    bench = Bench(engine)
    step, replica = bench.step, bench.replica
    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}
    batch = data(1, 4, replica)

    step.abort()
    assert "no step is" in _raised(RuntimeError, step.microbatch, "step-0", batch)
    assert "no step is" in _raised(RuntimeError, step.finish, "step-0")
    first = step.begin(loss, **sizes)
    assert step.open_step_id == first
    assert repr(first) in _raised(RuntimeError, step.begin, loss, **sizes)
    assert repr(first) in _raised(RuntimeError, step.microbatch, "other", batch)
    assert repr(first) in _raised(RuntimeError, step.abort, "other")
    step.abort(first)
    assert step.open_step_id is None
    assert "aborted" in _raised(RuntimeError, step.finish, first)
    assert "aborted" in _raised(RuntimeError, step.begin, loss, **sizes, step_id=first)
    second = step.begin(loss, **sizes)
    assert second != first
    step.microbatch(second, batch, last=True)
    assert "last batch" in _raised(RuntimeError, step.microbatch, second, batch)
    step.finish(second)
    assert "was finished" in _raised(RuntimeError, step.microbatch, second, batch)
    assert "all ranks have updated" in _raised(RuntimeError, step.abort, second)
    step.abort()


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_calls_out_of_order_are_errors_that_name_the_open_step(megatron_ranks, engine):
    megatron_ranks(2, calls_out_of_order, engine)


def calls_sent_again(engine: str) -> None:
    """Runs on a rank: the same ids again, and the numbers of a run in which nothing was
    repeated."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, cut, data

    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}

    def run(times: int):
        bench = Bench(engine, overlap_param_gather=True)
        step, replica = bench.step, bench.replica
        results = []
        for number in range(2):
            name = f"outer {number}"
            pieces = list(cut(data(number, 8, replica), [1, 3]))
            for _ in range(times):
                assert step.begin(loss, **sizes, step_id=name) == name
            for index, piece in enumerate(pieces):
                first = step.microbatch(name, piece, microbatch_id=f"piece {index}")
                for _ in range(times - 1):
                    assert step.begin(loss, **sizes, step_id=name) == name
                    again = step.microbatch(name, piece, microbatch_id=f"piece {index}")
                    assert again is first
            result = step.finish(name)
            for _ in range(times - 1):
                assert step.finish(name) is result
                assert step.begin(loss, **sizes, step_id=name) == name
            results.append(result)
        assert step.open_step_id is None
        differing = {**sizes, "micro_batch_size": 1}
        step.begin(loss, **sizes, step_id="third")
        assert "(2, 1)" in _raised(RuntimeError, step.begin, loss, **differing, step_id="third")
        step.abort()
        return results, bench.parameters()

    once, twice = run(1), run(3)
    assert once[0] == twice[0]
    assert torch.equal(once[1], twice[1])


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_what_is_sent_again_changes_nothing(megatron_ranks, engine):
    megatron_ranks(2, calls_sent_again, engine)


def _refused(model) -> list[str]:
    """Return what a step is told that asks for what it cannot do."""
    from megatron_idempotent import TrainStep

    told = []
    for owner, name, value in (
        (model.config, "overlap_moe_expert_parallel_comm", True),
        (model.config, "gtp_weight_remat_size", 2),
        (model.chunks[0].ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True),
    ):
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        told.append(_raised(ValueError, TrainStep, model.chunks, model.optimizer))
        setattr(owner, name, before)
    return told


def bad_arguments() -> list[str]:
    """Runs on a rank: what each is told; the step goes on as if they had not been."""
    import torch
    from scenario import ROWS, TokenLoss, build, cut, data, forward, split_step

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build()
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}
    batch = data(1, 8, replica)
    want = split_step(step, loss, batch, [4])

    model, scheduler, replica = build()
    told = [
        _raised(ValueError, TrainStep, model.chunks[0], model.optimizer),
        _raised(ValueError, TrainStep, [], model.optimizer),
        _raised(ValueError, TrainStep, model.chunks, torch.optim.SGD([torch.ones(1)])),
        *_refused(model),
        _raised(ValueError, TrainStep, model.chunks, model.optimizer, deadline_s=0),
        _raised(ValueError, TrainStep, model.chunks, model.optimizer, deadline_s="1"),
    ]
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)

    class Kindless(TokenLoss):
        kind = "mean"

    class Wrong(TokenLoss):
        normalizers: ClassVar = {"nll": "words"}

    for bad in (Kindless(), Wrong(), len):
        told.append(_raised(ValueError, step.begin, bad, **sizes))
    for name, value in [("global_batch_size", 0), ("micro_batch_size", 2.0), ("step_id", 3)]:
        told.append(_raised(ValueError, step.begin, loss, **{**sizes, name: value}))
    told.append(_raised(ValueError, step.begin, loss, **sizes, rank_batch_size=-1))
    name = step.begin(loss, **sizes, rank_batch_size=8)
    first, second = cut(batch, [1, 3])
    step.microbatch(name, first)
    for bad in (
        [1, 2],
        {"tokens": batch["input_ids"]},
        {"input_ids": torch.ones(3)},
        {**first, "token_mask": torch.ones(3, 4)},
        {**first, "sample_mask": torch.ones(ROWS, 2)},
        {**first, "sample_mask": [1.0, 1.0]},
        {**first, "weight": torch.tensor(1.0)},
        batch,
    ):
        told.append(_raised(ValueError, step.microbatch, name, bad))
    step.microbatch(name, second)
    assert step.finish(name).metrics == want.metrics
    return told


def test_bad_arguments_are_named_and_harm_nothing(megatron_ranks):
    for told in megatron_ranks(2, bad_arguments):
        parts = (
            "pass the list", "no model chunk", "SGD",
            "overlap_moe_expert_parallel_comm", "gtp_weight_remat_size",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "positive, got 0", "'1'",
            "'mean'", "'words'", "len",
            "global_batch_size, got 0", "micro_batch_size, got 2.0", "step_id, got 3",
            "rank_batch_size, got -1",
            "list", "NoneType", "(3,)", "(3, 4)", "(2, 2)", "list", "()", "rank_batch_size=8",
        )  # fmt: skip
        assert len(told) == len(parts)
        for text, part in zip(told, parts, strict=True):
            assert part in text


def without_what_it_needs() -> None:
    """Runs on a rank: no patches, no finalize function, no optimizer, a schedule called
    directly."""
    import torch
    from scenario import ROWS, TokenLoss, build, cut, data, forward, one_shot

    import megatron_idempotent
    from megatron_idempotent import TrainStep

    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model, scheduler, replica = build(experts=4, config_overrides=bias)
    megatron_idempotent.revert()
    told = _raised(RuntimeError, TrainStep, model.chunks, model.optimizer)
    assert "aux-loss-scale-left-set (disabled: " in told
    assert "forward-only-counts-tokens (disabled: " in told
    assert "counts for its expert bias" in told
    assert "megatron_idempotent.apply(), and exclude none of them" in told
    megatron_idempotent.apply(exclude=["forward-only-counts-tokens"])
    told = _raised(RuntimeError, TrainStep, model.chunks, model.optimizer)
    assert "forward-only-counts-tokens (disabled: " in told
    assert "aux-loss-scale-left-set" not in told
    model, scheduler, replica = build()
    megatron_idempotent.revert()
    megatron_idempotent.apply(exclude=["forward-only-counts-tokens"])
    TrainStep(model.chunks, model.optimizer)  # this model has no expert bias
    megatron_idempotent.apply()
    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}
    batch = data(1, 4, replica)

    reference = TrainStep(model.chunks, forward=forward, deadline_s=20)
    name = reference.begin(loss, **sizes)
    reference.microbatch(name, batch)
    assert "without an optimizer" in _raised(RuntimeError, reference.finish, name)
    reference.abort()

    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
    name = step.begin(loss, **sizes)
    step.microbatch(name, batch)
    gradients = model.gradients()
    assert gradients.any()
    other = TrainStep(model.chunks, model.optimizer)
    assert "is open for these chunks" in _raised(RuntimeError, other.begin, loss, **sizes)
    assert torch.equal(model.gradients(), gradients)
    assert "is open for these chunks" in _raised(
        RuntimeError, model.forward_backward, 1, data_seed=1, zero_first=False
    )
    assert torch.equal(model.gradients(), gradients)
    finalize = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = None
    assert "wire_train_config" in _raised(RuntimeError, step.finish, name)
    model.config.finalize_model_grads_func = finalize
    assert step.finish(name).updated
    # A config function that is None is None again, and the others are the caller's.
    assert model.config.finalize_model_grads_func is finalize
    assert model.config.grad_sync_func is None
    assert model.config.no_sync_func == model.chunks[0].no_sync
    one_shot(model, scheduler, loss, next(cut(batch, [2])))


def test_what_it_stands_on_is_asked_for_before_any_collective(megatron_ranks):
    megatron_ranks(2, without_what_it_needs)


SHARED = {"tp": 2, "sequence_parallel": True}


def refused_without(patch_id: str, layout: dict[str, Any], per_token: bool) -> tuple[bool, bool]:
    """Runs on a rank; returns whether this Megatron has the hazard, and whether a step refuses."""
    from scenario import build

    import megatron_idempotent
    from megatron_idempotent import TrainStep

    megatron_idempotent.revert()
    rows = {row.id: row.status for row in megatron_idempotent.apply(exclude=[patch_id])}
    overrides = {"calculate_per_token_loss": per_token}
    model, _, _ = build(experts=4, config_overrides=overrides, **layout)
    megatron_idempotent.revert()
    megatron_idempotent.apply(exclude=[patch_id])
    told = ""
    try:
        TrainStep(model.chunks, model.optimizer)
    except RuntimeError as error:
        told = str(error)
    refused = f"{patch_id} (disabled: " in told
    assert refused == bool(told), told
    return rows[patch_id] == "disabled", refused


@pytest.mark.parametrize(
    ("layout", "per_token"), [(SHARED, True), (SHARED, False), ({}, True)], ids=str
)
def test_auxiliary_losses_of_shared_sequences_want_their_patch(megatron_ranks, layout, per_token):
    """Their weight is wrong per token alone, and only where ranks share a sequence."""
    arguments = ("aux-loss-counts-own-tokens", layout, per_token)
    for there, refused in megatron_ranks(2, refused_without, *arguments):
        assert refused == (there and per_token and bool(layout))
