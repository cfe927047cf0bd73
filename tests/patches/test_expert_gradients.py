"""Gradients of experts are reduced over, and counted once by, those that hold the same part."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from megatron_idempotent.patches._case import counted, gathered
from megatron_idempotent.patches._engine_layers import group_experts
from ranks import RELEASE, built, needs_release, on_ranks, patch, tiered

from megatron_idempotent.proof.cpu import program, tiny

needs_release((0, 12), "the tests need a Megatron")

pytestmark = [pytest.mark.full, pytest.mark.patched]

LAYERS, EXPERTS, WIDTH = 2, 2, 4 * tiny.HIDDEN
#: The elements of all experts of the bench by kind; each is in one part or another.
WEIGHTS = LAYERS * EXPERTS * 2 * WIDTH * tiny.HIDDEN
BIASES = LAYERS * EXPERTS * (WIDTH + tiny.HIDDEN)
#: Tensor, expert and expert-tensor parallel sizes on two ranks.
SPLITS = [(2, 2, 1), (2, 1, 2), (2, 1, 1), (1, 1, 2), (1, 2, 1)]
refuses_biases = pytest.mark.skipif(RELEASE < (0, 15), reason="experts have no biases")


def experts_of(model: Any) -> list[Any]:
    return [
        each
        for chunk in model.chunks
        for name, each in chunk.named_parameters()
        if ".experts." in name
    ]


def counts(model: Any) -> tuple[int, int]:
    """Return the elements of experts in the norm, and in the number of zeros."""
    return counted(model, r"\.experts\."), counted(model, r"\.experts\.", zeros=True)


def split(tp: int, ep: int, etp: int, **more: Any) -> dict[str, Any]:
    return {
        "tp": tp,
        "ep": ep,
        "etp": etp,
        "experts": EXPERTS,
        "sequence_parallel": tp > 1,
        "overlap_grad_reduce": False,
        "dtype": "bf16",
        "optimizer_overrides": {"log_num_zeros_in_grad": True},
        **more,
    }


@pytest.mark.parametrize(("tp", "ep", "etp"), tiered(SPLITS, [(2, 2, 1), (1, 1, 2)], "full"))
@on_ranks(2)
def test_norm_and_zeros_have_each_element_of_an_expert_once(tp: int, ep: int, etp: int) -> None:
    for biases in [False, True] if etp == 1 and RELEASE >= (0, 15) else [False]:
        elements = WEIGHTS + (BIASES if biases else 0)
        for distributed_optimizer in (True, False):
            for group in (group_experts, None):
                model = built(
                    **split(tp, ep, etp, distributed_optimizer=distributed_optimizer),
                    before_ddp=group,
                    config_overrides={"add_bias_linear": biases},
                )
                assert counts(model) == (elements, elements), (biases, model.optimizer, group)


@refuses_biases
@on_ranks(2)
def test_a_clipped_gradient_has_the_norm_that_was_asked_for() -> None:
    model = built(
        **split(2, 2, 1, distributed_optimizer=False), config_overrides={"add_bias_linear": True}
    )
    model.forward_backward(2, data_seed=0)
    own = {id(each) for each in experts_of(model)}
    rank = torch.distributed.get_rank()

    def exact(gradients: list[tuple[Any, Any]]) -> float:
        """Return the norm in float64; the dense layers' copies are counted on rank 0."""
        squares = torch.zeros((), dtype=torch.float64, device="cuda")
        for parameter, gradient in gradients:
            parted = getattr(parameter, "tensor_model_parallel", False)
            if id(parameter) in own or parted or rank == 0:
                squares += gradient.double().square().sum()
        torch.distributed.all_reduce(squares)
        return math.sqrt(float(squares))

    parameters = [each for chunk in model.chunks for each in chunk.parameters()]
    right = exact([(each, each.main_grad) for each in parameters])
    limit = right / 2
    for part in [model.optimizer, *model.optimizer.chained_optimizers]:
        part.config.clip_grad = limit
    _, norm, _ = model.step()
    # Sums of so many squares in float32, and upstream's 1e-6 in the divisor.
    assert float(norm) == pytest.approx(right, rel=1e-5)
    mains = [each.main_param for each in parameters]
    clipped = exact([(each, main.grad) for each, main in zip(parameters, mains, strict=True)])
    assert clipped == pytest.approx(limit, rel=1e-5)


@pytest.mark.skipif(RELEASE < (0, 17), reason="the wheel has no megatron.training")
@on_ranks(2)
def test_the_norm_of_parameters_has_the_biases_of_all_experts() -> None:
    patch()

    def fill(module: Any) -> None:
        for name, each in module.named_parameters():
            each.data.fill_(1.0 if ".experts." in name and "bias" in name else 0.0)

    running = program.start(
        [
            *("--num-experts", str(EXPERTS), "--expert-model-parallel-size", "2"),
            *("--expert-tensor-parallel-size", "1", "--sequence-parallel", "--bf16"),
            *("--moe-token-dispatcher-type", "alltoall", "--moe-router-topk", "2"),
        ],
        tp=2,
        before_ddp=fill,
    )
    utils = importlib.import_module("megatron.training.utils")
    norm = float(utils.calc_params_l2_norm(running.chunks))
    assert round(norm**2) == EXPERTS * (WIDTH + tiny.HIDDEN)  # of one layer


@pytest.mark.skipif(not (0, 17) <= RELEASE < (0, 19), reason="marks experts, or has no training")
@on_ranks(2)
def test_buffers_that_are_laid_out_before_ddp_know_experts_that_are_split_otherwise() -> None:
    """Megatron's own set-up does so from 0.18 on, and DDP compares its buffers with the layout."""
    patch()
    running = program.start(
        [
            *("--num-experts", str(EXPERTS), "--expert-tensor-parallel-size", "1"),
            *("--sequence-parallel", "--bf16", "--disable-bias-linear"),
            *("--moe-token-dispatcher-type", "alltoall", "--moe-router-topk", "2"),
        ],
        tp=2,
    )
    running.train(1)
    (chunk,) = running.chunks
    assert sum(each.numel() for each in experts_of(running)) == WEIGHTS // LAYERS
    assert chunk.expert_parallel_bucket_groups


@pytest.mark.skipif(RELEASE < (0, 16), reason="no layer-wise optimizer")
@on_ranks(2)
def test_replicas_of_experts_divide_them_in_the_layer_wise_optimizer() -> None:
    """Without data parallelism of the other layers, too; the norm is that of another optimizer."""
    layout = split(2, 1, 1)
    plain = built(**layout)
    plain.forward_backward(2, data_seed=0)
    _, right, _ = plain.step()
    for by_layout in {False, tiny.has_layout()}:
        model = built(**layout, layer_wise=True, distributed_optimizer=by_layout)
        model.forward_backward(2, data_seed=0)
        _, norm, _ = model.step()
        # Sums of the same squares, in another order.
        assert float(norm) == pytest.approx(float(right), rel=1e-5)
        groups = [
            group
            for part in model.optimizer.chained_optimizers
            for group in part.param_groups
            if group["is_expert_parallel"]
        ]
        held = torch.tensor(
            [sum(each.numel() for group in groups for each in group["params"])], device="cuda"
        )
        torch.distributed.all_reduce(held)
        assert int(held) == WEIGHTS
        weights = torch.cat([each.detach().float().flatten() for each in experts_of(model)])
        ours, others = gathered(weights)
        assert torch.equal(ours, others)
