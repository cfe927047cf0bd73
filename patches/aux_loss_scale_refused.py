"""A MoE model cannot be trained after a forward under inference mode, or a direct backward.

Symptom:
    `RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed` from
    every training window, in `MoEAuxLossAutoScaler.main_loss_backward_scale.copy_(scale)`, if the
    first pipeline schedule ran forward-only under `torch.inference_mode()`, as for
    log-probabilities. `RuntimeError: output with shape [] doesn't match the broadcast shape [1]`
    from every window, if the first backward was a direct one (`loss.backward()`).

Cause:
    The first `MoEAuxLossAutoScaler.set_loss_scale` keeps its argument, and a backward before it
    creates a tensor without dimensions; each later call copies a tensor of one element into that
    tensor.

Affects:
    Every release. What the patch does: a tensor made under inference mode is stored as an ordinary
    copy, and a value takes the shape of the stored tensor before it is copied. The scaler of
    DeepSeek's sparse attention (`DSAIndexerLossAutoScaler`, since 0.16) has the same code and is
    not covered.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/moe_utils.py,
    `MoEAuxLossAutoScaler`.

Remove when:
    the scaler keeps its own tensor. `upstream/aux-loss-scale-refused` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, address, bench, target


def set_loss_scale(original: Original, scale: Any) -> None:
    """Call the original setter of the MoE loss scale with a `scale` that it accepts. If upstream
    has already stored a tensor, `scale` is reshaped like it; if not, and `scale` is an inference
    tensor, an ordinary copy of `scale` is passed.
    """
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    stored = MoEAuxLossAutoScaler.main_loss_backward_scale
    if stored is not None and stored.shape != scale.shape:
        scale = scale.reshape(stored.shape)
    elif stored is None and scale.is_inference():
        with torch.inference_mode(False):
            scale = scale.clone()
    original(scale)


def reproduce() -> None:
    """Run a forward-only pass of an MoE model under inference mode, then a training window.
    On stock Megatron the window raises, because it writes an inference tensor in place.
    """
    import torch

    model = bench(experts=4)
    with torch.inference_mode():
        model.forward_backward(2, data_seed=0, forward_only=True)
    model.forward_backward(2, data_seed=0)


PATCH = Patch(
    "MoE training raises after a forward under inference mode, or after a direct backward",
    target("moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale", set_loss_scale),
    groups=("aux-loss", "generation"),
    fixed_by=(
        (
            address("moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale"),
            "torch.inference_mode(False)",
        ),
    ),
    stock_error=r"RuntimeError: Inplace update to inference tensor outside InferenceMode",
)
