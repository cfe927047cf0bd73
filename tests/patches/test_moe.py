"""MoE layers: stages log the same metrics, and any backward keeps the auxiliary losses' weight."""

from __future__ import annotations

import importlib
import importlib.util
import types

import pytest
from abort_sites import Interrupted
from megatron_idempotent.patches._case import gathered
from megatron_idempotent.patches._routers import ROWS, SEQUENCES, gradient, router
from ranks import RELEASE, built, fails, on_microbatch, on_ranks, patch, same

from megatron_idempotent.proof.cpu import tiny

pytestmark = [pytest.mark.full, pytest.mark.patched]

TRACKER = "megatron.core.transformer.moe.moe_logging"


@on_ranks(2)
def test_stages_that_have_recorded_nothing_log_what_others_have():
    """Three rounds: nobody has a metric, the second stage has one, and both have, in two orders."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    patch()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    new = importlib.util.find_spec(TRACKER) is not None
    if new:
        tracker = importlib.import_module(TRACKER).MoEMetricsTracker()
        record, report = tracker.record, tracker.report
    else:
        record, report = moe_utils.save_to_aux_losses_tracker, moe_utils.track_moe_metrics
    # Up to 0.12 what has no writer tells nothing.
    writer = types.SimpleNamespace(add_scalar=lambda *_: None)
    one = torch.ones((), device="cuda")
    rounds = [
        ([[], []], {}),
        ([[], ["a loss"]], {"a loss": 1.0}),
        ([["a loss", "z loss"], ["z loss", "a loss"]], {"a loss": 2.0, "z loss": 2.0}),
    ]
    for recorded, expected in rounds:
        for name in recorded[stage]:
            record(name, one, stage + 1, 2)
        logged: dict[str, object] = {}
        report(1.0, 1, writer, num_layers=1, total_loss_dict=logged)
        assert {name: float(value) for name, value in logged.items()} == expected


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
    with on_microbatch(model, fails(Interrupted(), 1)), pytest.raises(Interrupted):
        model.forward_backward(4, data_seed=0)
    assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == 1.0


@pytest.mark.skipif(RELEASE < (0, 16), reason="the router takes no padding mask")
@pytest.mark.parametrize("padded", [0, ROWS // 2, ROWS])
@on_ranks(2)
def test_ranks_of_a_sequence_weigh_alike_wherever_its_padding_is(padded: int):
    """The second rank has it all. The right loss is that of all tokens, times their number."""
    import torch

    patch()
    part = router("aux_loss")
    mask = torch.zeros(ROWS, SEQUENCES, dtype=torch.bool, device="cuda")
    if torch.distributed.get_rank() == 1:
        mask[ROWS - padded :] = True
    computed = gradient(part, mask)

    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
    hidden = torch.randn(ROWS, SEQUENCES, part.config.hidden_size, generator=generator).cuda()
    hidden = hidden.double().requires_grad_()
    logits = (hidden @ part.weight.detach().double().T)[~mask]
    experts, topk = part.config.num_moe_experts, part.topk
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(topk, dim=1).indices, 1.0)
    counts = sum(gathered(chosen.sum(0)))
    tokens = counts.sum() / topk
    coefficient = part.config.moe_aux_loss_coeff * experts / (topk * tokens * tokens)
    (coefficient * (logits.softmax(-1).sum(0) * counts).sum() * tokens).backward()
    # The router computes in float32.
    assert torch.allclose(computed.double(), hidden.grad, rtol=1e-4, atol=1e-9)
