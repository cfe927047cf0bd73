"""Switching the pre-hooks of DDP off and on, in any order, on real ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import built, on_ranks


def patched(**options):
    model = built(["forward-pre-hook-reentry"], overlap_param_gather=True, **options)
    return model, model.chunks[0]


def disagreement(model) -> float:
    """Largest difference of any parameter between the data-parallel ranks."""
    mine = model.parameters()
    most, least = mine.clone(), mine.clone()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return float((most - least).abs().max())


@pytest.mark.parametrize("param_sync", [True, False])
@on_ranks(2)
def test_a_second_disable_still_synchronises_the_parameters_where_it_is_to(param_sync):
    """It has no hook to remove, but a gather to do."""
    model, chunk = patched()
    chunk.disable_forward_pre_hook()
    model.train_step(2, data_seed=0)
    assert disagreement(model) > 0, "with hooks off the step does not gather the ranks' shards"
    chunk.disable_forward_pre_hook(param_sync=param_sync)
    assert (disagreement(model) == 0) == param_sync
    assert len(chunk.remove_forward_pre_hook_handles) == 0


@on_ranks(2)
def test_modules_added_or_removed_after_the_wrap_are_no_obstacle():
    plain, stock = patched(applied=False)
    expected = plain.forward_backward(2, data_seed=0)
    stock.module.adapter = torch.nn.Linear(4, 4)
    with pytest.raises(KeyError):
        stock.disable_forward_pre_hook()
    model, chunk = patched()
    chunk.module.adapter = torch.nn.Linear(4, 4)
    chunk.disable_forward_pre_hook()
    left = sum(len(module._forward_pre_hooks) for module in chunk.module.modules())
    assert left == 0, "no hook of DDP's may be left over"
    chunk.enable_forward_pre_hook()
    del chunk.module.adapter
    chunk.disable_forward_pre_hook()
    chunk.enable_forward_pre_hook()
    assert model.forward_backward(2, data_seed=0) == expected


@on_ranks(2)
def test_a_second_enable_adds_no_hook():
    _, chunk = patched()

    def count() -> int:
        return sum(len(module._forward_pre_hooks) for module in chunk.module.modules())

    once = count()
    chunk.enable_forward_pre_hook()
    assert count() == once > 0
