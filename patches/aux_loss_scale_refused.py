"""A MoE model cannot be trained after a forward under inference mode, or a direct backward.

Symptom:
    `RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed` from
    every training window, in `MoEAuxLossAutoScaler.main_loss_backward_scale.copy_(scale)`, where
    the first pipeline schedule ran forward-only under `torch.inference_mode()`, as
    log-probabilities do. `RuntimeError: output with shape [] doesn't match the broadcast shape [1]`
    from every window, where the first backward was a direct one (`loss.backward()`).

Cause:
    The first `MoEAuxLossAutoScaler.set_loss_scale` keeps the tensor that it is given, and a
    backward before it makes one of no dimension; each later call copies a tensor of one element
    into it.

Affects:
    Every release. What the patch does: a tensor made under inference mode is stored as an ordinary
    copy, and what is copied into a stored tensor has its shape. The scaler of DeepSeek's sparse
    attention (`DSAIndexerLossAutoScaler`, since 0.16) has the same code and is not covered.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/moe_utils.py,
    `MoEAuxLossAutoScaler`.

Remove when:
    the scaler keeps a tensor of its own.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, bench, target


def set_loss_scale(original: Original, scale: Any) -> None:
    """Give upstream a tensor that it can keep, or copy into the one that it keeps."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    held = MoEAuxLossAutoScaler.main_loss_backward_scale
    if held is not None and held.shape != scale.shape:
        scale = scale.reshape(held.shape)
    elif held is None and scale.is_inference():
        with torch.inference_mode(False):
            scale = scale.clone()
    original(scale)


def reproduce() -> None:
    """Compute log-probs under inference mode, then run a training window."""
    import torch

    model = bench(experts=4)
    with torch.inference_mode():
        model.forward_backward(2, data_seed=0, forward_only=True)
    model.forward_backward(2, data_seed=0)


PATCH = Patch(
    "MoE training raises after a forward under inference mode, or after a direct backward",
    target("moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale", set_loss_scale),
    groups=("aux-loss", "generation"),
    stock_error=r"RuntimeError: Inplace update to inference tensor outside InferenceMode",
)
