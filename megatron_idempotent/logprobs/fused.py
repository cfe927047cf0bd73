"""What `kernels` computes of a block, in one expression each, for `torch.compile` to fuse."""

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
    """As `Partial` has them; sums in float64, because fused loops do not add up in pairs."""
    logits_nV = logits_nV.to(temperature_n.dtype)
    maximum_n = logits_nV.amax(-1)
    behind_n = torch.where(maximum_n == -torch.inf, 0.0, maximum_n)
    z_nV = (logits_nV - behind_n[:, None]) / temperature_n[:, None]
    mass_nV = z_nV.exp()
    moments_n = torch.zeros_like(maximum_n)
    if entropy:
        moments_n = (mass_nV * z_nV.clamp(min=FINITE)).sum(-1, dtype=torch.float64)
    place_V = torch.arange(logits_nV.shape[1], device=logits_nV.device)
    target_n = torch.where(place_V == local_n[:, None], z_nV, 0.0).sum(-1)
    return maximum_n, mass_nV.sum(-1, dtype=torch.float64), moments_n, target_n


def gradient(
    logits_nV: Tensor,
    local_n: Tensor,
    maximum_n: Tensor,
    log_sum_n: Tensor,
    entropy_n: Tensor,
    of_logprob_n: Tensor,
    of_entropy_n: Tensor | None,
    temperature_n: Tensor,
) -> Tensor:
    """As `write_gradient` writes it, rounded to the logits' type."""
    behind_n = torch.where(maximum_n == -torch.inf, 0.0, maximum_n)
    z_nV = (logits_nV.to(temperature_n.dtype) - behind_n[:, None]) / temperature_n[:, None]
    logp_nV = z_nV - log_sum_n[:, None]
    of_logprob_n1 = (of_logprob_n / temperature_n)[:, None]
    factor_nV = -of_logprob_n1
    if of_entropy_n is not None:
        inner_nV = logp_nV.clamp(min=FINITE) + entropy_n[:, None]
        factor_nV = factor_nV - inner_nV * (of_entropy_n / temperature_n)[:, None]
    place_V = torch.arange(logits_nV.shape[1], device=logits_nV.device)
    of_target_nV = torch.where(place_V == local_n[:, None], of_logprob_n1, 0.0)
    return (logp_nV.exp() * factor_nV + of_target_nV).to(logits_nV.dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of rows and columns."""
    return torch.compile(function, dynamic=True)
