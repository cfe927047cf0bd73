"""Gradient buffers and optimizer state put aside in the middle of a loop, on real ranks."""

from __future__ import annotations

import pytest

from megatron_idempotent.cpu import RankError
from megatron_idempotent.engine.versions import installed

release = installed("megatron-core")
if release is None or release.release < (0, 16):
    pytest.skip("gradient buffers can be offloaded from 0.16 on", allow_module_level=True)

ONLY = ["offload-drops-gradients", "zero-grad-while-offloaded"]


def built(**layout):
    import megatron_idempotent
    from megatron_idempotent.cpu import tiny

    megatron_idempotent.apply(only=ONLY)
    return tiny.build(**layout)


OPTIMIZERS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "experts": {"experts": 2},
    "all-reduce": {"distributed_optimizer": False},
    "bf16 all-reduce": {"distributed_optimizer": False, "dtype": "bf16"},
    "no overlap": {"overlap_grad_reduce": False},
}


def offload_between_iterations(layout: dict, times: int) -> list[float]:
    """On a rank: windows, steps, and an offload and a restore behind each, `times` over."""
    model = built(**layout)
    losses = []
    for seed in range(3):
        losses += model.forward_backward(2, data_seed=seed)
        model.step()
        for _ in range(times):
            for chunk in model.chunks:
                chunk.offload_grad_buffers()
                chunk.offload_grad_buffers()
                chunk.zero_grad_buffer()
                chunk.restore_grad_buffers()
                chunk.restore_grad_buffers()
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_offload_behind_each_step_changes_no_loss(kind, megatron_ranks):
    want = megatron_ranks(2, offload_between_iterations, OPTIMIZERS[kind], 0)
    assert megatron_ranks(2, offload_between_iterations, OPTIMIZERS[kind], 2) == want


def offload_with_gradients(layout: dict) -> None:
    """On a rank: the second window's gradients are still to be used."""
    model = built(**layout)
    model.forward_backward(2, data_seed=0)
    model.step()
    model.forward_backward(2, data_seed=1)
    for chunk in model.chunks:
        chunk.offload_grad_buffers()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_that_no_step_has_used_are_not_offloaded(kind, megatron_ranks):
    with pytest.raises(RankError, match=r"in \d of \d buffers: call optimizer.step\(\) first"):
        megatron_ranks(2, offload_with_gradients, OPTIMIZERS[kind])


def other_ways_to_spend_gradients() -> None:
    """On a rank: zeroed, skipped for an overflow, an update without `step`, none yet."""
    model = built(dtype="fp16", optimizer_overrides={"initial_loss_scale": 2.0**32})
    (chunk,) = model.chunks
    chunk.offload_grad_buffers()
    chunk.restore_grad_buffers()
    model.forward_backward(2, data_seed=0)
    success, _, _ = model.step()
    assert not success
    chunk.offload_grad_buffers()
    chunk.restore_grad_buffers()
    model.forward_backward(2, data_seed=1)
    chunk.zero_grad_buffer()
    chunk.offload_grad_buffers()
    chunk.restore_grad_buffers()
    model.forward_backward(2, data_seed=2)
    model.optimizer.step_with_ready_grads()
    chunk.offload_grad_buffers()


def test_gradients_that_are_zeroed_skipped_or_used_otherwise_may_go(megatron_ranks):
    megatron_ranks(2, other_ways_to_spend_gradients)


def offload_under_a_reduction() -> None:
    """On a rank: the last backward has dispatched its reductions; nobody has finished them."""
    model = built()
    # The first window only counts which gradients come.
    model.forward_backward(2, data_seed=0)
    model.step()
    model.config.finalize_model_grads_func = lambda *_, **__: None
    model.forward_backward(2, data_seed=1)
    model.chunks[0].offload_grad_buffers()


def test_memory_that_a_reduction_writes_to_is_not_freed(megatron_ranks):
    with pytest.raises(RankError, match=r"\d gradient reductions in flight"):
        megatron_ranks(2, offload_under_a_reduction)
