"""Log-probability passes outside of `no_grad` count tokens for the MoE expert bias.

Symptom:
    With `moe_router_enable_expert_bias`, a forward-only window outside of `torch.no_grad()`, even
    in eval mode, moves the expert bias of the next training step: the router balances its load over
    tokens that are not trained on. No error.

Cause:
    The router counts tokens whenever gradients are enabled; the schedules do not disable gradients
    for `forward_only=True`.

Affects:
    Every release. What the patch does: after a forward-only schedule with gradients enabled, the
    counts have their values from before it. The caller still decides whether gradients are enabled.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/router.py,
    `local_tokens_per_expert`.

Remove when:
    tokens are counted in training mode only, or the schedules disable gradients.
    `upstream/forward-only-counts-tokens` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from ._case import EXPERT_BIAS, Fault, Original, Patch, address, schedule_targets


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule; after a forward-only call with gradients enabled, restore the token counts.
    These are the routers' counts for the expert bias.
    """
    import torch

    chunks = schedules.chunks(kwargs["model"])
    if (
        not kwargs.get("forward_only", False)
        or not getattr(schedules.config_of(chunks), "moe_router_enable_expert_bias", False)
        or not torch.is_grad_enabled()
    ):
        return original(*args, **kwargs)
    counts = [
        module.local_tokens_per_expert
        for chunk in chunks
        for module in chunk.modules()
        if getattr(module, "local_tokens_per_expert", None) is not None
    ]
    saved = [count.clone() for count in counts]
    try:
        return original(*args, **kwargs)
    finally:
        for count, value in zip(counts, saved, strict=True):
            count.copy_(value)


def reproduce() -> None:
    """Run a forward-only window in eval mode with gradients enabled, with an expert bias.
    On stock Megatron the router counts its tokens.
    """
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(experts=4, config_overrides=EXPERT_BIAS)
    (chunk,) = model.chunks
    chunk.eval()
    model.schedule(tiny.microbatches(0), 2, forward_only=True)
    counted = chunk.module.decoder.layers[0].mlp.router.local_tokens_per_expert.sum()
    if counted:
        raise Fault(f"a forward-only window counted {int(counted)} tokens")


PATCH = Patch(
    "forward-only passes outside of no_grad move the MoE expert bias",
    *schedule_targets(schedule),
    groups=("aux-loss",),
    fixed_by=(
        (
            address("moe.router:TopKRouter._apply_expert_bias"),
            "self.enable_expert_bias and self.training and torch.is_grad_enabled()",
        ),
    ),
    provides=("forward-only-counts-nothing",),
    ranks=1,
)
