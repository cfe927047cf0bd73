"""The weight of the MoE auxiliary losses, where schedules and direct backwards meet."""

import pytest
from ranks import built, fails, on_microbatch, on_ranks, same

from megatron_idempotent.proof.cpu import tiny


@on_ranks(1)
def test_a_direct_backward_before_the_first_window_changes_nothing_in_it():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    model = built(experts=4)
    model.forward_backward(4, data_seed=0)
    want = model.gradients()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # as in a fresh process
    (chunk,) = model.chunks
    chunk.zero_grad_buffer()
    chunk(*tiny.inputs(0), labels=tiny.inputs(0)[0]).mean().backward()
    held = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert float(held) == 1.0
    model.forward_backward(4, data_seed=0)
    after = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert after is held, "captured graphs read the scale at its address"
    assert float(after) == 1.0
    assert same(model.gradients(), want)


@on_ranks(1)
def test_a_window_that_raises_puts_the_weight_back():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    model = built(experts=4)
    with (
        on_microbatch(model, fails(OSError("no data"), 1)),
        pytest.raises(OSError, match="no data"),
    ):
        model.forward_backward(4, data_seed=0)
    assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == 1.0
