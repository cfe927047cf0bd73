"""Expert biases of a frozen base move, and a checkpoint of its adapters does not contain them.

Symptom:
    With `moe_router_enable_expert_bias` a low-rank adapter is trained over a frozen base. After the
    base and the adapter are loaded again, routers choose other experts than in training. The
    log-probs of the reference model also change, if it is the base with the adapter off. No error.

Cause:
    `finalize_model_grads` moves the biases of all routers according to the tokens that they
    counted. `expert_bias` is a buffer, so `requires_grad_(False)` does not affect it, and filters
    for adapters, by name or by `requires_grad`, leave it out.

Affects:
    Every release. There is no patch, because a router with a frozen weight may still have to
    balance its load. Set `moe_router_bias_update_rate=0.0` if the base is frozen, in any release;
    from 0.19 on `frozen_expert_bias = True` does so for one router. Or save the biases with the
    adapter.

Upstream:
    https://github.com/modelscope/mcore-bridge/pull/195,
    https://github.com/NVIDIA/Megatron-LM/pull/4785, which adds `frozen_expert_bias`.

Remove when:
    routers of a frozen base keep their biases.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Limit, bench


def reproduce() -> None:
    """Train only the last norm over a frozen base; compare a router's expert bias before and after.
    On stock Megatron the bias of the frozen layer moves.
    """

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
    bias_before = bias.clone()
    model.train_step(1, data_seed=0)
    if not bias.equal(bias_before):
        raise Fault("an expert bias has moved, though its layer is frozen")


LIMIT = Limit(
    summary="experts' biases of a frozen base move, and are not in its adapter's checkpoint"
)
