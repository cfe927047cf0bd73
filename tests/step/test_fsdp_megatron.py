"""FSDP2 and Megatron agree on the same weights and data."""

import pytest
import scenario
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_idempotent
from megatron_idempotent import FSDPTrainStep
from megatron_idempotent.proof.cpu import tiny


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["TokenLoss", "SequenceLoss"])
@on_ranks(2)
def test_both_engines_agree(kind, tied):
    """Two steps of each engine on one GPT; names of what differs."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_idempotent import TrainStep

    loss = getattr(scenario, kind)()
    options = {
        "distributed_optimizer": False,
        "tied": tied,
        "config_overrides": {"calculate_per_token_loss": True},
        "optimizer_overrides": {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0},
    }
    common = {"forward": scenario.forward, "deadline_s": scenario.DEADLINE_S}
    megatron_idempotent.apply()
    megatron = tiny.build(**options)
    by_megatron = TrainStep(megatron.chunks, megatron.optimizer, **common)
    module = tiny.build(**options, with_optimizer=False).chunks[0].module
    mesh = init_device_mesh("cpu", (2,))
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0)
    by_fsdp = FSDPTrainStep(module, optimizer, clip_grad=None, **common)
    theirs = dict(megatron.chunks[0].module.named_parameters())
    differing = []
    for seed in (1, 2):
        batch = scenario.data(seed, 16, torch.distributed.get_rank())
        want = scenario.split_step(by_megatron, loss, batch, [1, 4, 3])
        got = scenario.split_step(by_fsdp, loss, batch, [1, 4, 3])
        squares, elements = 0.0, 0
        for name, ours in module.named_parameters():
            gradient = ours.grad.full_tensor()
            squares += float(gradient.double().square().sum())
            elements += gradient.numel()
            if not gradient.any() or not torch.equal(gradient, theirs[name].main_grad):
                differing.append(f"{seed}: gradient of {name}")
            if not torch.equal(ours.detach().full_tensor(), theirs[name].detach()):
                differing.append(f"{seed}: {name}")
        # A sum of n squares in float32 in any order is off by n u at most, u = 2**-24, and its
        # root by half of that and a rounding more.
        bound = (elements / 2 + 1) * 2.0**-24
        for norm in (got.grad_norm, want.grad_norm):
            assert abs(norm - squares**0.5) <= bound * squares**0.5
        for name in ("metrics", "rows", "microbatches", "global_valid_tokens", "lr"):
            if getattr(got, name) != getattr(want, name):
                differing.append(f"{seed}: {name}")
    # To the bit, and not only to float32's accuracy: both engines add up the same gradients of the
    # same microbatches in the same order, a sum over two ranks has one order, and FSDP2's mean
    # over two is divided by 2 and multiplied by 2 without rounding: x / 2 * (2 / N) = x * (1 / N).
    assert not differing
