"""Looking at gradients before the step, or stepping again, under a loss scale, on real ranks."""

from __future__ import annotations

import pytest

ONLY = ["unscaled-twice"]

OPTIMIZERS = {
    "main gradients are views": {},
    "main gradients are copies": {"ddp_overrides": {"grad_reduce_in_fp32": False}},
    "all-reduce": {"distributed_optimizer": False},
    "experts": {"experts": 2},
}


def run_windows(looks: int, windows: int, **layout) -> list:
    """Runs on a rank: what each step returned, then the loss scale and the parameters."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=ONLY)
    model = tiny.build(**layout)
    seen: list = []
    for window in range(windows):
        model.forward_backward(2, data_seed=window)
        for _ in range(looks):
            model.optimizer.prepare_grads()
        success, norm, _ = model.step()
        seen.append((success, None if norm is None else float(norm)))
    seen.append(float(model.optimizer.get_loss_scale()))
    return [*seen, model.parameters()]


def differences(layout: dict, windows: int) -> tuple[list, bool]:
    """Runs on a rank: whether two looks at the gradients before each step change anything."""
    import torch

    *plain, want = run_windows(0, windows, **layout)
    *looked_at, have = run_windows(2, windows, **layout)
    return plain, plain == looked_at and torch.equal(want, have)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_look_at_the_gradients_before_the_step_changes_no_bit(kind, megatron_ranks):
    layout = {"dtype": "bf16", "loss_scale": 1024.0, **OPTIMIZERS[kind]}
    for plain, same in megatron_ranks(2, differences, layout, 3):
        assert all(success for success, _ in plain[:-1])
        assert same


DYNAMIC = {
    "dtype": "fp16",
    "optimizer_overrides": {
        "initial_loss_scale": 2.0**24,
        "loss_scale_window": 1,
        "hysteresis": 1,
        "min_loss_scale": 1.0,
    },
}


def test_a_dynamic_loss_scale_counts_each_window_once(megatron_ranks):
    # It falls until nothing overflows and grows after each window that did not.
    for plain, same in megatron_ranks(2, differences, DYNAMIC, 12, timeout_s=120):
        successes = [success for success, _ in plain[:-1]]
        assert True in successes
        assert False in successes
        assert same


def copies_under_a_growing_scale() -> tuple[float, float]:
    """Runs on a rank: the norm after one and two `prepare_grads`, the scale having doubled
    between."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=ONLY)
    overrides = {"initial_loss_scale": 16.0, "loss_scale_window": 1}
    model = tiny.build(
        dtype="fp16",
        optimizer_overrides=overrides,
        ddp_overrides={"grad_reduce_in_fp32": False},
    )
    model.forward_backward(2, data_seed=0)
    model.optimizer.prepare_grads()
    once = float(model.optimizer.get_grad_norm())
    assert float(model.optimizer.get_loss_scale()) == 32.0
    model.optimizer.prepare_grads()
    return once, float(model.optimizer.get_grad_norm())


def test_copies_are_unscaled_by_the_scale_that_the_loss_had(megatron_ranks):
    for once, twice in megatron_ranks(2, copies_under_a_growing_scale):
        assert once == twice


def step_twice(loss_scale: float) -> tuple[list[float], float]:
    """Runs on a rank: two steps on one window's gradients."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=ONLY)
    model = tiny.build(dtype="bf16", loss_scale=loss_scale)
    model.forward_backward(2, data_seed=0)
    norms = [float(model.step()[1]) for _ in range(2)]
    return norms, float(model.parameters().double().sum())


def test_a_second_step_on_the_same_gradients_does_not_depend_on_the_loss_scale(megatron_ranks):
    # Powers of two change no bit.
    assert megatron_ranks(2, step_twice, 1024.0) == megatron_ranks(2, step_twice, 1.0)


def next_window() -> list[float]:
    """Runs on a rank: the second window's norm, its gradients prepared once, and without the
    patch."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    norms = []
    for only in (ONLY, []):
        with megatron_idempotent.patched(only=only):
            model = tiny.build(dtype="bf16", loss_scale=1024.0)
            for seed in range(2):
                model.forward_backward(2, data_seed=seed)
                _, norm, _ = model.step()
            norms.append(float(norm))
    return norms


def test_the_next_window_is_unscaled_anew(megatron_ranks):
    for patched, stock in megatron_ranks(2, next_window):
        assert patched == stock


def clipped_by_the_caller() -> tuple[float, float]:
    """Runs on a rank: the norm of the update's gradients after prepare, clip and a step; 0.5 is
    it."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=ONLY)
    model = tiny.build(dtype="bf16", loss_scale=1024.0)
    model.forward_backward(2, data_seed=0)
    model.optimizer.prepare_grads()
    (inner,) = model.optimizer.chained_optimizers
    inner.clip_grad_norm(0.5)
    before = float(model.optimizer.get_grad_norm())
    _, norm, _ = model.step()
    return before, float(norm)


def test_gradients_that_the_caller_clipped_are_not_unscaled_by_the_step(megatron_ranks):
    for before, norm in megatron_ranks(2, clipped_by_the_caller):
        assert before == norm
