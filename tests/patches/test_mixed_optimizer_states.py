"""Optimizer state is each parameter's own where a model has weights of 16 bits and of 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_idempotent.patches.optimizer_states_of_others import keep_norms_in_32_bits
from ranks import RELEASE, built, needs_release, on_ranks

needs_release((0, 12), "the tests need a Megatron")

pytestmark = pytest.mark.full

is_reshardable = pytest.mark.skipif(RELEASE < (0, 15), reason="no format for every layout")


def mixed() -> Any:
    model = built(dtype="bf16", overlap_grad_reduce=False, before_ddp=keep_norms_in_32_bits)
    model.train_step(1, data_seed=0)
    return model


def saved(model: Any, sharding: str) -> Any:
    """Return the state that an optimizer gives to a save in one of the formats."""
    (optimizer,) = model.optimizer.chained_optimizers
    weights = model.chunks[0].module.sharded_state_dict()
    if RELEASE < (0, 14):
        return optimizer.sharded_state_dict(weights, sharding_type=sharding)
    return optimizer.sharded_state_dict(weights, metadata={"distrib_optim_sharding_type": sharding})


@is_reshardable
@on_ranks(2)
def test_the_state_of_every_layout_has_each_parameters_main_weights() -> None:
    """Weights of 16 bits are the rounded main weights; those of 32 bits are the main weights."""
    model = mixed()
    (optimizer,) = model.optimizer.chained_optimizers
    entries = saved(model, "fully_reshardable")["param_state"].values()
    parameters = [each for buffer in optimizer.buffers for each in buffer.param_index_map]
    assert {each.dtype for each in parameters} == {torch.float32, torch.bfloat16}
    for entry, parameter in zip(entries, parameters, strict=True):
        main = entry["param"].data
        assert main.dtype == torch.float32
        assert torch.equal(main.to(parameter.dtype), parameter.detach().cpu())


@is_reshardable
@on_ranks(2)
def test_a_load_of_its_own_state_changes_nothing_and_needs_no_no_grad() -> None:
    model = mixed()
    (optimizer,) = model.optimizer.chained_optimizers
    before = model.bits()
    state = saved(model, "fully_reshardable")["param_state"]
    loaded = {
        index: {
            ("fp32_param" if name == "param" else name): part.data.clone()
            for name, part in entry.items()
        }
        for index, entry in state.items()
    }
    optimizer.load_parameter_state_from_fully_reshardable(loaded)
    assert model.bits() == before


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_a_model_of_one_kind_keeps_its_order(dtype: str) -> None:
    orders = []
    for only in ([], ["optimizer-states-of-others"]):
        model = built(only, applied=bool(only), dtype=dtype, overlap_grad_reduce=False)
        (optimizer,) = model.optimizer.chained_optimizers
        orders.append(list(optimizer.model_param_group_index_map.values()))
    stock, patched = orders
    assert patched == stock
