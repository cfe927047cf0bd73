"""The computations of `kernels`, one expression each, for `torch.compile` to fuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: In place of -inf where it meets a probability of 0, whose product is 0 then and not NaN.
FINITE = -1e30


def statistics(
    logits_nV: Tensor, local_n: Tensor, temperature_n: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the fields of `Partial`; sums in float64, since fused loops do not add in pairs."""
    logits_nV = logits_nV.to(temperature_n.dtype)
    maximum_n = logits_nV.amax(-1).clamp(min=FINITE)
    z_nV = (logits_nV - maximum_n[:, None]) / temperature_n[:, None]
    target_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == local_n[:, None]
    exponentials_nV = torch.where(target_nV, 0.0, z_nV.exp())
    moments_n = torch.zeros_like(maximum_n)
    if entropy:
        moments_n = (exponentials_nV * z_nV.clamp(min=FINITE)).sum(-1, dtype=torch.float64)
    target_n = torch.where(target_nV, z_nV, 0.0).sum(-1)
    return maximum_n, exponentials_nV.sum(-1, dtype=torch.float64), moments_n, target_n


def gradient(
    logits_nV: Tensor,
    local_n: Tensor,
    origin_n: Tensor,
    factor_n: Tensor,
    slope_n: Tensor | None,
    of_target_n: Tensor,
    temperature_n: Tensor,
) -> Tensor:
    """Returns what `write_gradient` writes, rounded to the logits' type."""
    z_nV = (logits_nV.to(temperature_n.dtype) - origin_n[:, None]) / temperature_n[:, None]
    factor_nV = factor_n[:, None]
    if slope_n is not None:
        factor_nV = factor_nV + z_nV.clamp(min=FINITE) * slope_n[:, None]
    target_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == local_n[:, None]
    gradient_nV = torch.where(target_nV, of_target_n[:, None], z_nV.exp() * factor_nV)
    return gradient_nV.to(logits_nV.dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for any number of rows and columns."""
    return torch.compile(function, dynamic=True)
