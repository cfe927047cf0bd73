"""State that `begin` sets up and `abort` puts back, also on an optimizer that is on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks, tiered
from scenario import Bench, Broken, Fault, TokenLoss, cut, raised_by, scenario, split_step

from megatron_idempotent import WindowAborted, ensure_main_params_synced


@pytest.mark.parametrize("what", ["loss scale", "rates"])
@on_ranks(2)
def test_what_an_aborted_update_has_changed_never_was(what: str) -> None:
    """The loss scale, or the rates, have changed when the last call of an update
    raises."""

    dynamic = {"initial_loss_scale": 1024.0, "min_loss_scale": 1.0, "hysteresis": 1}
    half = {"dtype": "fp16", "optimizer_overrides": dynamic}
    scaled = what == "loss scale"
    bench = Bench(step={"undo": True}, **(half if scaled else {}))
    bench.run([bench.batch(2)])
    owner, name = (bench.optimizer, "step") if scaled else (bench.scheduler, "step")

    def state() -> list[float]:
        groups = bench.optimizer.param_groups
        rates = [group[each] for group in groups for each in ("lr", "weight_decay")]
        return [float(bench.optimizer.get_loss_scale()), bench.scheduler.num_steps, *rates]

    before, parameters = state(), bench.parameters()
    stepped, finalize = getattr(owner, name), bench.model.config.finalize_model_grads_func

    def raising(*args, **kwargs):
        stepped(*args, **kwargs)
        changed = [a != b for a, b in zip(state(), before, strict=True)]
        assert changed[:2] == [scaled, not scaled]
        raise ValueError("logging failed")

    setattr(owner, name, raising)
    told = raised_by(bench.run, [bench.batch(2)], loss=TokenLoss(float("inf") if scaled else 1.0))
    assert isinstance(told, WindowAborted)
    assert "logging failed" in str(told)
    bench.step.abort()
    setattr(owner, name, stepped)
    assert state() == before
    assert torch.equal(bench.parameters(), parameters)
    assert bench.model.config.finalize_model_grads_func is finalize
    assert bench.run([bench.batch(2)]).updated
    assert torch.isfinite(bench.parameters()).all()
    assert bench.begin() == "step-3"


@on_ranks(2)
def test_modes_logs_and_counts_are_put_back() -> None:
    """Eval mode, MoE logs and router counts are those from before the step.

    A key-value cache that generation left in a module is gone when a step begins.
    """
    from megatron_idempotent.step.snapshot import logged

    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    bench = Bench(experts=4, config_overrides=bias)
    step, module, batch = bench.step, bench.model.chunks[0], bench.batch(2)
    bench.model.forward_backward(1, data_seed=1)  # what a caller logs, from before
    before = [value.clone() for value in logged()]
    assert any(value.any() for value in before)
    router = next(m for m in module.modules() if hasattr(m, "expert_bias"))
    counted = router.local_tokens_per_expert.clone()
    module.eval()
    random = torch.get_rng_state()
    layer, reset = bench.module.decoder.layers[0], []
    layer.inference_params = layer._inference_key_value_memory = object()
    layer.reset_inference_cache = lambda: reset.append(True)
    step_id = bench.begin()
    assert (layer.inference_params, layer._inference_key_value_memory) == (None, None)
    assert reset == [True]
    assert all(each.training for each in module.modules())
    step.microbatch(step_id, batch)
    assert not all(map(torch.equal, logged(), before))
    step.abort()
    assert all(map(torch.equal, logged(), before))
    assert torch.equal(router.local_tokens_per_expert, counted)
    assert not any(each.training for each in module.modules())
    assert torch.equal(torch.get_rng_state(), random)
    step_id = bench.begin()
    step.microbatch(step_id, batch)

    def open_state() -> list[torch.Tensor]:
        counts = router.local_tokens_per_expert.clone()
        return [torch.get_rng_state(), bench.gradients(), counts]

    now = open_state()
    with step.reading() as (chunk,):
        assert not any(each.training for each in chunk.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
        router.local_tokens_per_expert += 1
    assert all(map(torch.equal, open_state(), now))
    assert all(each.training for each in module.modules())
    step.abort()
    # And an evaluation that does not put its mode back does not change what a step trains.
    step_id = bench.begin()
    module.eval()
    step.microbatch(step_id, batch)
    assert all(each.training for each in module.modules())
    step.abort()


@on_ranks(2)
def test_a_step_scales_and_holds_back_where_nobody_wired_it() -> None:
    """Without `grad_scale_func` or `no_sync_func` the gradient norms are the
    same."""
    norms = []
    for lacking in (None, "grad_scale_func", "no_sync_func"):
        bench = Bench(dtype="bf16", loss_scale=256.0)
        if lacking is not None:
            setattr(bench.model.config, lacking, None)
        # The last batch starts the reductions, in calls of one and of two microbatches.
        norms.append(
            [
                split_step(bench.step, bench.loss, bench.batch(4), each, last=True).grad_norm
                for each in ([3, 1], [2, 2])
            ]
        )
        assert lacking is None or getattr(bench.model.config, lacking) is None
    assert norms[0] == norms[1] == norms[2], norms


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_a_nan_is_found_before_any_rank_reduces(overlap: bool) -> None:
    """A NaN on one rank, with Megatron's check for it."""

    bench = Bench(overlap_grad_reduce=overlap, ddp_overrides={"check_for_nan_in_grad": True})
    pieces = list(cut(bench.batch(2), [1, 1]))
    told = raised_by(bench.run, pieces, loss=TokenLoss(float("nan") if bench.rank == 1 else 1.0))
    assert isinstance(told, WindowAborted)
    bench.step.abort()
    assert bench.run(pieces).updated
    assert str(told).startswith("rank 1: ")
    assert "nan" in str(told).lower()


def layout(fraction: float, *, precise: bool = False) -> dict[str, Any]:
    return {
        "dtype": "bf16",
        "optimizer_overrides": {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "use_precision_aware_optimizer": precise,
            "overlap_cpu_optimizer_d2h_h2d": True,
        },
        "step": {"undo": True},
    }


KINDS = [layout(0.5), layout(1.0), layout(0.5, precise=True)]


@pytest.mark.parametrize("kind", tiered(KINDS, KINDS[::2]))
@on_ranks(2)
def test_a_step_that_broke_off_leaves_no_bit(kind: dict[str, Any]) -> None:
    """Steps that fail, in a loss or between two inner optimizers, change no bit."""
    whole = [("step", [2]), ("step", [2], {"seed": 2}), ("step", [2], {"seed": 3})]
    want = scenario(kind, whole)
    failing = [("step", [2], {"seed": 9}), ("abort",)]
    actions = [step for each in whole for step in (*failing, each)]
    got = scenario(kind, actions, [Fault("loss", 3 * number) for number in range(3)])
    assert [each is None for each in got.told] == [False, True, True] * 3
    assert all(torch.equal(*pair) for pair in zip(got.bits[-1], want.bits[-1], strict=True))

    def broken(*_: Any) -> None:
        raise Broken("out of memory")

    bench = Bench(**kind)
    for number in range(3):
        inner = bench.optimizer.chained_optimizers[0].optimizer.sub_optimizers
        assert len(inner) > 2
        # The first ones have stepped by then.
        handle = inner[len(inner) // 2].register_step_pre_hook(broken)
        with pytest.raises(WindowAborted, match="All ranks can go back"):
            bench.run([bench.batch(2, seed=9)])
        handle.remove()
        bench.step.abort(bench.step_id)
        result = bench.run([bench.batch(2, seed=number + 1)])
    found = bench.bits(result)
    assert all(torch.equal(*pair) for pair in zip(found, want.bits[-1], strict=True))


@on_ranks(2)
def test_weights_beside_the_optimizer_are_refused_before_the_update():
    """The step after weights were written into the model."""
    for kind in ({"dtype": "bf16"}, *KINDS):
        bench = Bench(**kind)
        bench.run([bench.batch(2)])
        before = bench.parameters()
        with torch.no_grad():
            for each in bench.module.parameters():
                each.mul_(2.0)
        with pytest.raises(WindowAborted, match="written into the model, and not into the"):
            bench.run([bench.batch(2)])
        bench.step.abort(bench.step_id)
        assert torch.equal(bench.parameters(), 2 * before), "as it was written"
        assert ensure_main_params_synced(bench.optimizer) > 0
        bench.run([bench.batch(2)])
        assert (bench.parameters() - 2 * before).abs().max() < 0.1
