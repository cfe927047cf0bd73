"""Looking at gradients before the step, or stepping again, under a loss scale, on real ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import built, on_ranks, same

import megatron_idempotent

pytestmark = pytest.mark.full

ONLY = ["unscaled-twice"]
HALF = {"dtype": "bf16", "loss_scale": 1024.0}
OPTIMIZERS = {
    "main gradients are views": {},
    "main gradients are copies": {"ddp_overrides": {"grad_reduce_in_fp32": False}},
    "all-reduce": {"distributed_optimizer": False},
    "experts": {"experts": 2},
}


def looked_at(windows: int, **layout) -> list[bool]:
    """Successes of the steps; two looks at the gradients before each change nothing."""

    def run(looks: int):
        model = built(ONLY, **layout)
        seen: list = []
        for window in range(windows):
            model.forward_backward(2, data_seed=window)
            for _ in range(looks):
                model.optimizer.prepare_grads()
            success, norm, _ = model.step()
            seen.append((success, None if norm is None else float(norm)))
        return [*seen, float(model.optimizer.get_loss_scale())], model.parameters()

    (plain, want), (looked, have) = run(0), run(2)
    assert plain == looked
    assert same(want, have)
    return [success for success, _ in plain[:-1]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_a_look_at_the_gradients_before_the_step_changes_no_bit(kind):
    assert all(looked_at(3, **HALF, **OPTIMIZERS[kind]))


@on_ranks(2, timeout_s=120)
def test_a_dynamic_loss_scale_counts_each_window_once():
    # It falls until nothing overflows and grows after each window that did not.
    overrides = {"loss_scale_window": 1, "hysteresis": 1, "min_loss_scale": 1.0}
    overrides["initial_loss_scale"] = 2.0**24
    assert set(looked_at(12, dtype="fp16", optimizer_overrides=overrides)) == {True, False}


@on_ranks(2)
def test_copies_are_unscaled_by_the_scale_that_the_loss_had():
    """The scale doubles between two `prepare_grads`."""
    overrides = {"initial_loss_scale": 16.0, "loss_scale_window": 1}
    copies = OPTIMIZERS["main gradients are copies"]
    model = built(ONLY, dtype="fp16", optimizer_overrides=overrides, **copies)
    model.forward_backward(2, data_seed=0)
    model.optimizer.prepare_grads()
    once = float(model.optimizer.get_grad_norm())
    assert float(model.optimizer.get_loss_scale()) == 32.0
    model.optimizer.prepare_grads()
    assert float(model.optimizer.get_grad_norm()) == once


@on_ranks(2)
def test_a_second_step_on_the_same_gradients_does_not_depend_on_the_loss_scale():
    def step_twice(loss_scale: float) -> list[float]:
        model = built(ONLY, dtype="bf16", loss_scale=loss_scale)
        model.forward_backward(2, data_seed=0)
        norms = [float(model.step()[1]) for _ in range(2)]
        return [*norms, float(model.parameters().double().sum())]

    assert step_twice(1024.0) == step_twice(1.0)  # powers of two change no bit


@on_ranks(2)
def test_the_next_window_is_unscaled_again():
    """The norm is that without the patch."""
    norms = []
    for only in (ONLY, []):
        with megatron_idempotent.patched(only=only):
            model = built(only, **HALF)
            for seed in range(2):
                model.forward_backward(2, data_seed=seed)
                _, norm, _ = model.step()
            norms.append(float(norm))
    assert norms[0] == norms[1]


@on_ranks(2)
def test_gradients_that_the_caller_clipped_are_not_unscaled_by_the_step():
    model = built(ONLY, **HALF)
    model.forward_backward(2, data_seed=0)
    model.optimizer.prepare_grads()
    (inner,) = model.optimizer.chained_optimizers
    inner.clip_grad_norm(0.5)
    before = float(model.optimizer.get_grad_norm())
    _, norm, _ = model.step()
    assert before == float(norm)


@pytest.mark.parametrize("looks", [0, 2])
@pytest.mark.parametrize("distributed", [True, False])
@on_ranks(2)
def test_a_stage_without_trainable_parameters_counts_each_window_once(distributed, looks):
    """The scale starts so high that the first windows overflow."""

    def freeze_last_stage(module):
        if torch.distributed.get_rank() == 1:
            module.requires_grad_(False)

    scaling = {"initial_loss_scale": 2.0**24, "loss_scale_window": 1, "hysteresis": 1}
    model = built(
        ONLY,
        pp=2,
        dtype="fp16",
        distributed_optimizer=distributed,
        before_ddp=freeze_last_stage,
        optimizer_overrides={**scaling, "min_loss_scale": 1.0},
    )
    successes = set()
    for window in range(12):
        model.forward_backward(2, data_seed=window)
        before = float(model.optimizer.get_loss_scale())
        found = [model.optimizer.prepare_grads() for _ in range(looks)]
        success, _, _ = model.step()
        assert found == [not success] * looks
        scale = float(model.optimizer.get_loss_scale())
        assert scale == (before * 2 if success else before / 2)
        successes.add(success)
    assert successes == {True, False}
