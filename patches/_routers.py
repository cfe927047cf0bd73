"""Runs a router alone, with or without a padding mask, to measure its auxiliary losses."""

from __future__ import annotations

from typing import Any

from ._case import bench

#: The rows of a tensor-parallel rank's part of the sequence, and the sequences.
ROWS, SEQUENCES = 16, 2


def takes_padding() -> bool:
    """Return whether the router of this Megatron release takes a padding mask."""
    import inspect

    from megatron.core.transformer.moe.router import TopKRouter

    return "padding_mask" in inspect.signature(TopKRouter.forward).parameters


def router(kind: str, **layout: Any) -> Any:
    """Build a model with MoE load balancing loss `kind`, and return its first router.
    The config has `calculate_per_token_loss`.
    """
    model = bench(
        tp=2,
        ep=2,
        etp=1,
        experts=4,
        sequence_parallel=True,
        overlap_grad_reduce=False,
        with_optimizer=False,
        wire=False,
        config_overrides={
            "calculate_per_token_loss": True,
            "moe_aux_loss_coeff": 0.125,
            "moe_router_load_balancing_type": kind,
        },
        **layout,
    )
    return model.chunks[0].module.decoder.layers[0].mlp.router


def gradient(router: Any, mask: Any = None) -> Any:
    """Return the gradient of a router's random inputs that comes from its auxiliary losses alone.
    Its shape is [ROWS, SEQUENCES, H].

    Args:
        router: the router.
        mask: [ROWS, SEQUENCES], True at padding.
    """
    import torch

    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
    hidden = torch.randn(ROWS, SEQUENCES, router.config.hidden_size, generator=generator).cuda()
    hidden.requires_grad_()
    probs, _ = router(hidden, **({} if mask is None else {"padding_mask": mask}))
    (probs * 0).sum().backward()
    return hidden.grad
