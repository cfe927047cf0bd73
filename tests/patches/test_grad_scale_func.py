"""The loss scale reaches the loss wherever an optimizer was built, and stays out of copies."""

from __future__ import annotations

import pytest


def _build(**options):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=["grad-scale-func"])
    return tiny.build(wire=False, overlap_grad_reduce=False, **options)


def wired() -> tuple[float, bool, bool, bool]:
    """Runs on a rank: the scale of one, a reference model, a copy and a pickle of the config."""
    import copy
    import pickle

    import torch

    model = _build(dtype="bf16", loss_scale=1024.0)
    reference = _build(with_optimizer=False)
    scaled = float(model.config.grad_scale_func(torch.ones(1)))
    copied = copy.deepcopy(model.config)
    unpickled = pickle.loads(pickle.dumps(model.config.grad_scale_func))
    return (
        scaled,
        reference.config.grad_scale_func is None,
        copied.grad_scale_func._optimizer() is model.optimizer,
        unpickled is None,
    )


def test_every_optimizer_wires_its_loss_scale_and_a_reference_model_keeps_none(megatron_ranks):
    for scale, reference_is_none, same_optimizer, pickles_to_none in megatron_ranks(2, wired):
        assert scale == 1024.0
        assert reference_is_none
        assert same_optimizer, "a copied config must not copy the optimizer"
        assert pickles_to_none


def rebuilt() -> tuple[float, float, bool]:
    """Runs on a rank: a second optimizer over the same chunks, then one whose config has its
    own."""
    import torch
    from megatron.core import optimizer

    model = _build(dtype="bf16", loss_scale=1024.0)
    one = torch.ones(1)
    before = float(model.config.grad_scale_func(one))

    def config(loss_scale: float) -> optimizer.OptimizerConfig:
        return optimizer.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            loss_scale=loss_scale,
        )

    second = optimizer.get_megatron_optimizer(config(8.0), model.chunks)
    after = float(model.config.grad_scale_func(one))
    assert second is not None

    def own(loss):
        return loss

    model.config.grad_scale_func = own
    third = optimizer.get_megatron_optimizer(config(4.0), model.chunks)
    assert third is not None
    return before, after, model.config.grad_scale_func is own


def test_a_rebuilt_optimizer_rebinds_and_somebody_elses_function_stays(megatron_ranks):
    for before, after, kept in megatron_ranks(2, rebuilt):
        assert (before, after) == (1024.0, 8.0)
        assert kept


def outlived() -> tuple[list[float], bool]:
    """Runs on a rank: a model whose optimizer is gone; its losses, and the gradient of a probe."""
    import gc

    import torch
    from megatron.core.distributed import finalize_model_grads

    model, never = (_build(dtype="bf16", loss_scale=1024.0, experts=4) for _ in range(2))
    never.config.grad_scale_func = model.optimizer = None
    gc.collect()
    gradients = []
    for each in (model, never):
        each.config.finalize_model_grads_func = finalize_model_grads
        losses = each.forward_backward(1, data_seed=1, forward_only=True)
        each.forward_backward(2, data_seed=0)
        gradients.append(each.gradients())
    return losses, torch.equal(*gradients)


def test_a_model_whose_optimizer_is_gone_computes_what_one_without_any_does(megatron_ranks):
    # Log-probabilities of an MoE model ask for the scale too.
    for losses, same in megatron_ranks(2, outlived):
        assert len(losses) == 1
        assert same


def scaled_by_the_loss_function(applied: bool) -> list[float]:
    """Runs on a rank: gradient norms of three steps whose loss function calls `scale_loss`."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(strict=True)
    model = tiny.build(dtype="fp16", loss_scale=256.0, pp=2, wire=False, overlap_grad_reduce=False)
    model.config.finalize_model_grads_func = _finalize()
    model.on_microbatch = lambda _, loss: None if loss is None else model.optimizer.scale_loss(loss)
    norms = []
    for window in range(3):
        model.forward_backward(2, data_seed=window)
        norms.append(float(model.step()[1]))
    return norms


def test_a_loss_function_that_scales_by_itself_is_not_scaled_again(megatron_ranks):
    stock, patched = (megatron_ranks(2, scaled_by_the_loss_function, on) for on in (False, True))
    assert stock == patched


def norms_of_a_rebuilt_optimizer(left_by: str, dtype: str) -> tuple[float, float]:
    """Runs on a rank: the gradient norm of a second optimizer with another scale, and of a first
    one."""
    from megatron.core import optimizer

    second, first = (
        {"initial_loss_scale": scale, "loss_scale": None if dtype == "fp16" else scale}
        for scale in (1.0, 1024.0)
    )
    model = _build(dtype=dtype, optimizer_overrides=first)
    if left_by == "stock train":
        model.config.grad_scale_func = model.optimizer.scale_loss
    config = model.optimizer.chained_optimizers[0].config
    for name, value in second.items():
        setattr(config, name, value)
    model.optimizer = optimizer.get_megatron_optimizer(config, model.chunks)
    fresh = _build(dtype=dtype, optimizer_overrides=second)
    norms = []
    for each in (model, fresh):
        each.config.finalize_model_grads_func = _finalize()
        each.forward_backward(2, data_seed=0)
        norms.append(float(each.step()[1]))
    return norms[0], norms[1]


def _finalize():
    from megatron.core.distributed import finalize_model_grads

    return finalize_model_grads


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("left_by", ["this patch", "stock train"])
def test_a_rebuilt_optimizer_is_not_given_a_loss_scaled_by_its_predecessor(
    left_by, dtype, megatron_ranks
):
    for rebuilt_norm, fresh_norm in megatron_ranks(2, norms_of_a_rebuilt_optimizer, left_by, dtype):
        assert rebuilt_norm == fresh_norm
