"""The loss scale reaches the loss wherever an optimizer was built, and stays out of copies."""

from __future__ import annotations

import gc

import pytest
import torch
from ranks import built, on_ranks, same

pytestmark = pytest.mark.full


def _build(**options):
    return built(["grad-scale-func"], wire=False, overlap_grad_reduce=False, **options)


def _finalize():
    from megatron.core.distributed import finalize_model_grads

    return finalize_model_grads


@on_ranks(2)
def test_every_optimizer_wires_its_loss_scale_and_a_reference_model_keeps_none():
    import copy
    import pickle

    model = _build(dtype="bf16", loss_scale=1024.0)
    reference = _build(with_optimizer=False)
    assert float(model.config.grad_scale_func(torch.ones(1))) == 1024.0
    assert reference.config.grad_scale_func is None
    copied = copy.deepcopy(model.config)
    assert copied.grad_scale_func._optimizer() is model.optimizer, "the optimizer is not copied"
    assert pickle.loads(pickle.dumps(model.config.grad_scale_func)) is None


@on_ranks(2)
def test_a_rebuilt_optimizer_rebinds_and_somebody_elses_function_stays():
    from megatron.core import optimizer

    model = _build(dtype="bf16", loss_scale=1024.0)

    def rebuild(loss_scale: float):
        config = optimizer.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            loss_scale=loss_scale,
        )
        return optimizer.get_megatron_optimizer(config, model.chunks)

    one = torch.ones(1)
    assert float(model.config.grad_scale_func(one)) == 1024.0
    second = rebuild(8.0)
    assert float(model.config.grad_scale_func(one)) == 8.0

    def own(loss):
        return loss

    model.config.grad_scale_func = own
    assert rebuild(4.0) is not second
    assert model.config.grad_scale_func is own


@on_ranks(2)
def test_a_model_whose_optimizer_is_gone_computes_what_one_without_any_does():
    model, never = (_build(dtype="bf16", loss_scale=1024.0, experts=4) for _ in range(2))
    never.config.grad_scale_func = model.optimizer = None
    gc.collect()
    for each in (model, never):
        each.config.finalize_model_grads_func = _finalize()
        # Log-probabilities of an MoE model ask for the scale too.
        assert len(each.forward_backward(1, data_seed=1, forward_only=True)) == 1
        each.forward_backward(2, data_seed=0)
    assert same(model, never)


def scaled_by_the_loss_function(applied: bool) -> list[float]:
    """Runs on a rank: gradient norms of three steps whose loss function calls `scale_loss`."""
    layout = {"pp": 2, "wire": False, "overlap_grad_reduce": False}
    model = built(applied=applied, dtype="fp16", loss_scale=256.0, **layout)
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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("left_by", ["this patch", "stock train"])
@on_ranks(2)
def test_a_rebuilt_optimizer_is_not_given_a_loss_scaled_by_its_predecessor(left_by, dtype):
    """The gradient norm of a second optimizer with another scale is that of a first one."""
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
    norms = []
    for each in (model, _build(dtype=dtype, optimizer_overrides=second)):
        each.config.finalize_model_grads_func = _finalize()
        each.forward_backward(2, data_seed=0)
        norms.append(float(each.step()[1]))
    assert norms[0] == norms[1]
