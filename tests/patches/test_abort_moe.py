"""Tokens that the routers counted in an aborted window, and what the next one does with them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from abort_sites import Interrupted

EXPERT_BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
GLOBAL_LOSS = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}


def windows(
    recovery: str | None, overrides: dict[str, Any], *, abort: bool
) -> tuple[str, str] | None:
    """Runs on a rank: digests of the gradients and of all expert biases after a window.

    Before it another window is aborted in its second microbatch, or none. None where the release
    does not know the kind of loss.
    """
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if recovery == "patches":
        megatron_idempotent.apply()
    model = tiny.build(experts=4, overlap_grad_reduce=False, config_overrides=overrides)
    (chunk,) = model.chunks
    counted = [
        module
        for module in chunk.modules()
        if getattr(module, "local_tokens_per_expert", None) is not None
        or getattr(module, "global_tokens_per_expert", None) is not None
    ]
    if not counted:
        return None

    def interrupt(index: int, loss: Any) -> None:
        if index == 1 and loss is None:
            raise Interrupted

    if abort:
        model.on_microbatch = interrupt
        with pytest.raises(Interrupted):
            model.forward_backward(2, data_seed=1)
        model.on_microbatch = None
        if recovery == "abort_window":
            megatron_idempotent.abort_window(model.chunks, model.optimizer)
    model.forward_backward(2, data_seed=0)
    biases = [m.expert_bias for m in counted if getattr(m, "expert_bias", None) is not None]
    values = (model.gradients(), torch.cat([torch.zeros(1), *biases]))
    grads, bias = (hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in values)
    return grads, bias


@pytest.mark.parametrize("recovery", ["patches", "abort_window"])
@pytest.mark.parametrize("overrides", [EXPERT_BIAS, GLOBAL_LOSS], ids=["bias", "global-loss"])
def test_the_next_window_counts_its_own_tokens_only(megatron_ranks, recovery, overrides):
    never = megatron_ranks(2, windows, recovery, overrides, abort=False)
    if None in never:
        pytest.skip("the installed Megatron has no such loss")
    assert megatron_ranks(2, windows, recovery, overrides, abort=True) == never


@pytest.mark.parametrize(("overrides", "differs"), [(EXPERT_BIAS, 1), (GLOBAL_LOSS, 0)])
def test_stock_megatron_counts_those_of_the_aborted_window_too(megatron_ranks, overrides, differs):
    never = megatron_ranks(2, windows, None, overrides, abort=False)
    if None in never:
        pytest.skip("the installed Megatron has no such loss")
    for one, other in zip(
        megatron_ranks(2, windows, None, overrides, abort=True), never, strict=True
    ):
        assert one[differs] != other[differs]
