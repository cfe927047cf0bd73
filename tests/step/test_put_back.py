"""State that `begin` sets up and `abort` puts back, besides gradients and parameters."""

from __future__ import annotations

from typing import Any


def _begun(options: dict[str, Any], **more: Any):
    from scenario import ROWS, TokenLoss, build, data, forward

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build(**options)
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20, **more
    )

    def begin() -> str:
        return step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)

    return model, scheduler, step, begin, data(1, 2 * ROWS, replica)


def loss_scale() -> None:
    """Runs on a rank: an overflow has lowered the scale when the scheduler raises."""
    import torch
    from scenario import TokenLoss, raised_by, split_step

    from megatron_idempotent import WindowAborted

    dynamic = {"initial_loss_scale": 1024.0, "min_loss_scale": 1.0, "hysteresis": 1}
    options = {"dtype": "fp16", "optimizer_overrides": dynamic}
    model, scheduler, step, begin, batch = _begun(options)

    class Infinite(TokenLoss):
        def __call__(self, output, microbatch):
            loss, metrics = super().__call__(output, microbatch)
            return loss * float("inf"), metrics

    finalize = model.config.finalize_model_grads_func
    stepped = model.optimizer.step

    def raising() -> None:
        stepped()
        assert float(model.optimizer.get_loss_scale()) == 512.0
        raise ValueError("logging failed")

    model.optimizer.step = raising
    told = raised_by(split_step, step, Infinite(), batch, [2])
    assert isinstance(told, WindowAborted)
    assert "logging failed" in str(told)
    step.abort()
    model.optimizer.step = stepped
    assert float(model.optimizer.get_loss_scale()) == 1024.0
    assert model.config.finalize_model_grads_func is finalize
    assert scheduler.num_steps == 0
    assert split_step(step, TokenLoss(), batch, [2]).updated
    assert torch.isfinite(model.parameters()).all()
    assert begin() == "step-2"


def test_the_loss_scale_of_an_aborted_step_never_was(megatron_ranks):
    megatron_ranks(2, loss_scale)


def rates() -> None:
    """Runs on a rank: the scheduler raises after its step, and after the update."""
    import torch
    from scenario import TokenLoss, parameters, raised_by, split_step

    from megatron_idempotent import WindowAborted

    model, scheduler, step, _, batch = _begun({}, undo=True)
    split_step(step, TokenLoss(), batch, [2])
    before = [(group["lr"], group["weight_decay"]) for group in model.optimizer.param_groups]
    weights, stepped = parameters(model), scheduler.step

    def raising(increment: int) -> None:
        stepped(increment)
        raise ValueError("logging failed")

    scheduler.step = raising
    told = raised_by(split_step, step, TokenLoss(), batch, [2])
    assert isinstance(told, WindowAborted)
    assert "logging failed" in str(told)
    assert scheduler.num_steps == 16
    step.abort()
    del scheduler.step
    assert scheduler.num_steps == 8
    after = [(group["lr"], group["weight_decay"]) for group in model.optimizer.param_groups]
    assert after == before
    assert torch.equal(parameters(model), weights)


def test_the_rates_of_an_aborted_step_never_were(megatron_ranks):
    megatron_ranks(2, rates)


def modes_and_logs() -> None:
    """Runs on a rank: eval mode, MoE logs and router counts are those from before the step."""
    import torch

    from megatron_idempotent.step.snapshot import _logged

    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model, _, step, begin, batch = _begun({"experts": 4, "config_overrides": bias})
    model.forward_backward(1, data_seed=1)  # what a caller logs, from before
    before = [value.clone() for value in _logged()]
    assert any(value.any() for value in before)
    router = next(m for m in model.chunks[0].modules() if hasattr(m, "expert_bias"))
    counted = router.local_tokens_per_expert.clone()
    model.chunks[0].eval()
    random = torch.get_rng_state()
    step_id = begin()
    assert all(module.training for module in model.chunks[0].modules())
    step.microbatch(step_id, batch)
    assert not all(map(torch.equal, _logged(), before))
    step.abort()
    assert all(map(torch.equal, _logged(), before))
    assert torch.equal(router.local_tokens_per_expert, counted)
    assert not any(module.training for module in model.chunks[0].modules())
    assert torch.equal(torch.get_rng_state(), random)
    step_id = begin()
    step.microbatch(step_id, batch)
    open_state = torch.get_rng_state(), model.gradients(), router.local_tokens_per_expert.clone()
    with step.reading() as (chunk,):
        assert not any(module.training for module in chunk.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
        router.local_tokens_per_expert += 1
    now = torch.get_rng_state(), model.gradients(), router.local_tokens_per_expert
    assert all(map(torch.equal, open_state, now))
    assert all(module.training for module in model.chunks[0].modules())
    step.abort()
    # And an evaluation that does not put its mode back does not change what a step trains.
    step_id = begin()
    model.chunks[0].eval()
    step.microbatch(step_id, batch)
    assert all(module.training for module in model.chunks[0].modules())
    step.abort()


def test_modes_logs_and_counts_are_put_back(megatron_ranks):
    megatron_ranks(2, modes_and_logs)


def inference_leftovers() -> None:
    """Runs on a rank: a key-value cache that generation left in a module is gone when a step
    begins."""
    model, _, step, begin, _ = _begun({})
    layer = model.chunks[0].module.decoder.layers[0]
    layer.inference_params = object()
    layer._inference_key_value_memory = object()
    reset: list[bool] = []
    layer.reset_inference_cache = lambda: reset.append(True)
    begin()
    assert (layer.inference_params, layer._inference_key_value_memory) == (None, None)
    assert reset == [True]
    step.abort()


def test_inference_caches_are_dropped(megatron_ranks):
    megatron_ranks(2, inference_leftovers)


def unwired() -> None:
    """Runs on a rank: without `grad_scale_func` or `no_sync_func` the gradient norms are the
    same."""
    from scenario import TokenLoss, data, split_step

    options = {"dtype": "bf16", "loss_scale": 256.0}
    norms = []
    for lacking in (None, "grad_scale_func", "no_sync_func"):
        model, _, step, _, _ = _begun(options)
        if lacking is not None:
            setattr(model.config, lacking, None)
        batch = data(1, 8, step._backend.replica)
        # The last batch starts the reductions, in calls of one, three and two microbatches.
        pieces = ([3, 1], [1, 3], [2, 2])
        norms.append(
            [split_step(step, TokenLoss(), batch, each, last=True).grad_norm for each in pieces]
        )
        assert lacking is None or getattr(model.config, lacking) is None
    assert norms[0] == norms[1] == norms[2], norms


def test_a_step_scales_and_holds_back_where_nobody_wired_it(megatron_ranks):
    megatron_ranks(2, unwired)


def checked_gradients(overlap: bool) -> str:
    """Runs on a rank: a NaN on one rank, with Megatron's check for it; what this rank is told."""
    import torch
    from scenario import TokenLoss, raised_by, split_step

    from megatron_idempotent import WindowAborted

    options = {"overlap_grad_reduce": overlap, "ddp_overrides": {"check_for_nan_in_grad": True}}
    _, _, step, _, batch = _begun(options)

    class Bad(TokenLoss):
        def __call__(self, output, microbatch):
            loss, metrics = super().__call__(output, microbatch)
            bad = float("nan") if torch.distributed.get_rank() == 1 else 1.0
            return loss * bad, metrics

    told = raised_by(split_step, step, Bad(), batch, [1, 1])
    assert isinstance(told, WindowAborted)
    step.abort()
    assert split_step(step, TokenLoss(), batch, [1, 1]).updated
    return str(told)


def test_a_nan_is_found_before_any_rank_reduces(megatron_ranks):
    for overlap in (False, True):
        for told in megatron_ranks(2, checked_gradients, overlap):
            assert told.startswith("rank 1: ")
            assert "nan" in told.lower()
