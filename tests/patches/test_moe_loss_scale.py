"""The weight of the MoE auxiliary losses, where schedules and direct backwards meet."""

from __future__ import annotations


def direct_first() -> tuple[float, float, bool]:
    """Runs on a rank: a direct backward before any schedule, a window, and the scale left over."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(experts=4)
    model.forward_backward(4, data_seed=0)
    want = model.gradients()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # as in a fresh process
    (chunk,) = model.chunks
    tokens_BT = next(tiny.microbatches(0))
    positions_BT = torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1)
    hidden = torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE).tril() < 0.5
    chunk.zero_grad_buffer()
    chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT).mean().backward()
    held = MoEAuxLossAutoScaler.main_loss_backward_scale
    model.forward_backward(4, data_seed=0)
    after = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert after is held, "captured graphs read the scale at its address"
    return float(held), float(after), torch.equal(model.gradients(), want)


def test_a_direct_backward_before_the_first_window_changes_nothing_in_it(megatron_ranks):
    assert megatron_ranks(1, direct_first) == [(1.0, 1.0, True)]


def raised() -> float:
    """Runs on a rank: the scale after a window that raises in its second microbatch."""
    import pytest
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(experts=4)

    def fail(index, loss):
        if index == 1:
            raise OSError("no data")

    model.on_microbatch = fail
    with pytest.raises(OSError, match="no data"):
        model.forward_backward(4, data_seed=0)
    return float(MoEAuxLossAutoScaler.main_loss_backward_scale)


def test_a_window_that_raises_puts_the_weight_back(megatron_ranks):
    assert megatron_ranks(1, raised) == [1.0]
