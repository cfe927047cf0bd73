"""Experts' biases of a frozen base move, and a checkpoint of its adapters does not have them.

Symptom:
    With `moe_router_enable_expert_bias` a low-rank adapter is trained over a frozen base. The base
    is loaded again, and the adapter over it: routers choose other experts than they did in
    training. The reference model's log-probs move, too, where it is the base with the adapter off.
    No error.

Cause:
    `finalize_model_grads` moves the biases of all routers by the tokens that they have counted.
    `expert_bias` is a buffer, so `requires_grad_(False)` says nothing to it, and a filter of
    adapters by name, or of what requires gradients, leaves it out.

Affects:
    Every release. Nothing here repairs it: a router whose weight is frozen may be meant to balance
    its load. Set `moe_router_bias_update_rate=0.0` where the base is frozen, which all releases
    take; from 0.19 on `frozen_expert_bias = True` does so for one router. Or save the biases with
    the adapter.

Upstream:
    https://github.com/modelscope/mcore-bridge/pull/195,
    https://github.com/NVIDIA/Megatron-LM/pull/4785, which brings `frozen_expert_bias`.

Remove when:
    Routers of a frozen base keep their biases.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Limit, bench


def reproduce() -> None:
    """Train the last norm over a base that is frozen, and compare the biases of its experts."""

    def freeze(module: Any) -> None:
        module.requires_grad_(False)
        module.decoder.final_layernorm.requires_grad_(True)

    model = bench(
        experts=4,
        overlap_grad_reduce=False,
        before_ddp=freeze,
        config_overrides={
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    )
    bias = model.chunks[0].module.decoder.layers[0].mlp.router.expert_bias
    before = bias.clone()
    model.train_step(1, data_seed=0)
    if not bias.equal(before):
        raise Fault("an expert's bias has moved, and all of its layer is frozen")


LIMIT = Limit(
    summary="experts' biases of a frozen base move, and are not in its adapter's checkpoint"
)
