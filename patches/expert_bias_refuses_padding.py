"""A router with an expert bias raises with a padding mask, or counts padding.

Symptom:
    With `moe_router_enable_expert_bias` and `padding_mask` a training forward raises `RuntimeError:
    The size of tensor a … must match the size of tensor b …`. If a rank has as many tokens as there
    are experts it does not raise, but masks experts instead of tokens: the bias is updated from
    wrong loads. Without the mask padding counts as tokens, in the bias and in the auxiliary losses.

Cause:
    `_apply_expert_bias` combines the routing map [tokens, experts] with a mask [tokens].

Affects:
    0.16 and later, in which routers take a mask. Repaired on Megatron main. What the patch does:
    the mask has the shape [tokens, 1].

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/6111,
    https://github.com/NVIDIA/Megatron-LM/pull/6114, and for routers without a padding mask
    https://github.com/NVIDIA/Megatron-LM/issues/1984,
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5470,
    https://github.com/modelscope/ms-swift/pull/10181.

Remove when:
    no release without that change is supported.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, no_body_has, target


def count(original: Original, self: Any, routing_map: Any, padding_mask: Any = None) -> None:
    """Wrap the router's count of tokens: reshape a padding mask to [tokens, 1].
    Upstream's function then masks tokens, and not experts.
    """
    if padding_mask is not None and padding_mask.dim() == 1:
        padding_mask = padding_mask[:, None]
    original(self, routing_map, padding_mask=padding_mask)


def reproduce() -> None:
    """Route four tokens over four experts with three of them masked, and compare the token counts.
    On stock Megatron the mask hides experts instead of tokens.
    """
    import torch

    from megatron_idempotent.proof.cpu import tiny

    experts = 4
    model = tiny.build(
        experts=experts,
        config_overrides={
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    )
    router = model.chunks[0].module.decoder.layers[0].mlp.router
    tokens = torch.randn(experts, 1, tiny.HIDDEN, device="cuda")
    router(tokens, torch.tensor([[False], [True], [True], [True]], device="cuda"))
    counted = router.local_tokens_per_expert.clone()
    router.local_tokens_per_expert.zero_()
    router(tokens[:1])
    if not torch.equal(counted, router.local_tokens_per_expert):
        raise Fault(
            f"{counted.tolist()} assignments are counted, and one token has "
            f"{router.local_tokens_per_expert.tolist()}"
        )


PATCH = Patch(
    "a router with an expert bias and a padding mask raises, or counts padding",
    target("moe.router:TopKRouter._apply_expert_bias", count),
    since="0.16",
    fixed_when=lambda bodies: (
        a_body_has("(~padding_mask).unsqueeze(-1)", "(~flat_mask).unsqueeze(-1)")(bodies)
        or no_body_has("padding_mask")(bodies)  # its counts take no padding mask yet
    ),
    provides=("expert-bias-knows-padding",),
    ranks=1,
    loudness="both",
)
