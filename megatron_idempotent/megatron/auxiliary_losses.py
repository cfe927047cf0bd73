"""Finds the scales of auxiliary losses in Megatron, and the totals that it logs of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_TRANSFORMER = "megatron.core.transformer"
_SCALERS = (
    (f"{_TRANSFORMER}.moe.moe_utils", "MoEAuxLossAutoScaler"),
    (f"{_TRANSFORMER}.multi_token_prediction", "MTPLossAutoScaler"),
    (f"{_TRANSFORMER}.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)
_LOGS = (
    (f"{_TRANSFORMER}.multi_token_prediction", "MTPLossLoggingHelper"),
    (f"{_TRANSFORMER}.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)


def scalers() -> Iterator[Any]:
    """The classes whose `main_loss_backward_scale` the schedules set, where loaded."""
    for module, name in _SCALERS:
        scaler = getattr(sys.modules.get(module), name, None)
        if scaler is not None:
            yield scaler


def layer_logs() -> Iterator[Any]:
    """The tensors that MTP and DSA layers add their losses to; those of MoE are elsewhere."""
    import torch

    for module, name in _LOGS:
        tracker = getattr(getattr(sys.modules.get(module), name, None), "tracker", {})
        yield from (value for value in tracker.values() if isinstance(value, torch.Tensor))
