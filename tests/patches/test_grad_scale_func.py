"""The loss scale reaches the loss wherever an optimizer was built, and stays out of copies."""

from __future__ import annotations


def _build(**options):
    import megatron_idempotent
    from megatron_idempotent.cpu import tiny

    megatron_idempotent.apply(only=["grad-scale-func"])
    return tiny.build(wire=False, overlap_grad_reduce=False, **options)


def wired() -> tuple[float, bool, bool, bool]:
    """On a rank: the scale of one, a reference model, a copy and a pickle of the config."""
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
    """On a rank: a second optimizer over the same chunks, then one whose config has its own."""
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


def outlived() -> str:
    """On a rank: what a config says whose optimizer is gone."""
    import gc

    import torch

    model = _build(dtype="bf16", loss_scale=1024.0)
    function = model.config.grad_scale_func
    model.optimizer = None
    gc.collect()
    try:
        function(torch.ones(1))
    except ReferenceError as error:
        return str(error)
    return "no error"


def test_a_loss_scale_without_its_optimizer_is_a_clear_error(megatron_ranks):
    for message in megatron_ranks(2, outlived):
        assert "belongs to an optimizer that no longer exists" in message
        assert "build the new one with get_megatron_optimizer" in message
