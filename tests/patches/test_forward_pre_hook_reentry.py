"""Switching the pre-hooks of DDP off and on, in any order, on real ranks."""

from __future__ import annotations

import pytest

from megatron_idempotent.proof.cpu import RankError


def _patched_model(*, applied: bool = True):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(only=["forward-pre-hook-reentry"])
    return tiny.build(overlap_param_gather=True)


def disagreement(model) -> float:
    """Runs on a rank: largest difference of any parameter between the data-parallel ranks."""
    import torch

    mine = model.parameters()
    most, least = mine.clone(), mine.clone()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return float((most - least).abs().max())


def disable_twice_with_an_update_pending() -> tuple[float, float, int]:
    """Runs on a rank: the second disable has no hook to remove, but a gather to do."""
    model = _patched_model()
    (chunk,) = model.chunks
    chunk.disable_forward_pre_hook()
    model.forward_backward(2, data_seed=0)
    model.step()
    before = disagreement(model)
    chunk.disable_forward_pre_hook()
    return before, disagreement(model), len(chunk.remove_forward_pre_hook_handles)


def test_a_second_disable_still_synchronises_the_parameters(megatron_ranks):
    for before, after, handles in megatron_ranks(2, disable_twice_with_an_update_pending):
        assert before > 0, "with hooks off the ranks' shards are not gathered by the step"
        assert after == 0
        assert handles == 0


def disable_twice_without_sync() -> float:
    """Runs on a rank: `param_sync=False` gathers nothing, on the second call either."""
    model = _patched_model()
    (chunk,) = model.chunks
    chunk.disable_forward_pre_hook()
    model.forward_backward(2, data_seed=0)
    model.step()
    chunk.disable_forward_pre_hook(param_sync=False)
    return disagreement(model)


def test_a_second_disable_without_param_sync_gathers_nothing(megatron_ranks):
    assert all(left > 0 for left in megatron_ranks(2, disable_twice_without_sync))


def adapter_added(*, applied: bool) -> tuple[int, list[float]]:
    """Runs on a rank: a module joins the tree after DDP was wrapped around it, and one leaves."""
    import torch

    model = _patched_model(applied=applied)
    (chunk,) = model.chunks
    chunk.module.adapter = torch.nn.Linear(4, 4)
    chunk.disable_forward_pre_hook()
    off = sum(len(module._forward_pre_hooks) for module in chunk.module.modules())
    chunk.enable_forward_pre_hook()
    del chunk.module.adapter
    chunk.disable_forward_pre_hook()
    chunk.enable_forward_pre_hook()
    return off, model.forward_backward(2, data_seed=0)


def plain_losses() -> list[float]:
    """Runs on a rank: the losses of a model whose hooks nobody touched."""
    return _patched_model(applied=False).forward_backward(2, data_seed=0)


def test_modules_added_or_removed_after_the_wrap_are_no_obstacle(megatron_ranks):
    expected = megatron_ranks(2, plain_losses)
    results = megatron_ranks(2, adapter_added, applied=True)
    assert [losses for _, losses in results] == expected
    assert all(off == 0 for off, _ in results), "no hook of DDP's may be left over"


def test_stock_megatron_raises_for_a_module_added_after_the_wrap(megatron_ranks):
    with pytest.raises(RankError, match="KeyError"):
        megatron_ranks(2, adapter_added, applied=False)


def enabled_twice() -> tuple[int, int]:
    """Runs on a rank: number of pre-hooks in the tree after one and after two enables."""
    model = _patched_model()
    (chunk,) = model.chunks

    def count() -> int:
        return sum(len(module._forward_pre_hooks) for module in chunk.module.modules())

    once = count()
    chunk.enable_forward_pre_hook()
    return once, count()


def test_a_second_enable_adds_no_hook(megatron_ranks):
    for once, twice in megatron_ranks(2, enabled_twice):
        assert once == twice > 0
