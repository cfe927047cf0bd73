"""What the case files about `megatron.training.training.train` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target

UPSTREAM = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py"

# Releases before 0.17 carry the module in a source checkout only; their bodies go by relies_on.
_REVIEWED = {
    "27b38390540b": "0.17.0 to 0.17.1",
    "dd755bb11482": "0.18.0 to 0.18.2",
    "adc4dcbd540f": "0.19.0 to 0.19.2",
}


def target(wrapper: Callable[..., Any], *relies_on: str) -> Target:
    """Upstream's `train`, wrapped at entry and exit; its body is new in every release."""
    return Target(
        address="megatron.training.training:train",
        wrapper=wrapper,
        reviewed=_REVIEWED,
        relies_on=relies_on,
    )
