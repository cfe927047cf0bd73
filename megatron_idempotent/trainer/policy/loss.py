"""The GRPO objective: a pure function of tensors.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossParts:
    """Sums over response tokens, not means: the caller divides by the tokens of all ranks.

    Each is a scalar tensor. `loss` carries the gradient; the rest are measurements: the KL
    penalty (without its coefficient), the share of tokens whose ratio was clipped (as a count),
    and the number of response tokens. Example: `parts.loss / parts.tokens` is the mean.
    """

    loss: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor
    tokens: torch.Tensor


def grpo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference_logprobs_BT: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
    weights_BT: torch.Tensor | None = None,
) -> LossParts:
    """Clipped policy gradient with a group-relative advantage, summed over response tokens.

    ratio = exp(logprobs - old_logprobs)
    loss  = - sum over response tokens of
              min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A)  - kl_coefficient x k3
    k3    = exp(reference - logprobs) - (reference - logprobs) - 1,  which is never negative
    Denominator: none here; the mean is over response tokens on all ranks of one optimizer step.

    With `weights_BT` it is decoupled PPO: the old log-probs are those of the weights that the step
    starts from, and a weight, which no gradient reaches, multiplies the min(...) of its token: the
    importance ratio to the weights that sampled, see `correction`. The KL penalty is not weighted.

    `loss_mask_BT` is 1.0 on response tokens and 0.0 elsewhere; what the other tensors hold there
    has no influence, NaN included. Errors: `ValueError` for a KL coefficient without a reference.
    """
    if kl_coefficient and reference_logprobs_BT is None:
        raise ValueError(
            f"kl_coefficient is {kl_coefficient} and there are no reference log-probs; pass "
            "reference_logprobs_BT, or a coefficient of 0"
        )
    response_BT = loss_mask_BT > 0
    # Masked before exp(): a padding position may overflow, and inf x 0 in the backward is NaN.
    log_ratio_BT = torch.where(response_BT, logprobs_BT - old_logprobs_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain_BT = advantages_B[:, None]
    objective_BT = torch.minimum(ratio_BT * gain_BT, clipped_BT * gain_BT)
    if weights_BT is not None:
        objective_BT = objective_BT * torch.where(response_BT, weights_BT.detach(), 0.0)
    loss = -torch.where(response_BT, objective_BT, 0.0).sum()
    kl = torch.zeros_like(loss)
    if reference_logprobs_BT is not None:
        gap_BT = torch.where(response_BT, reference_logprobs_BT - logprobs_BT, 0.0)
        kl = (gap_BT.exp() - gap_BT - 1.0).sum()
        loss = loss + kl_coefficient * kl
    held_BT = (clipped_BT * gain_BT < ratio_BT * gain_BT) & response_BT
    return LossParts(
        loss=loss,
        kl=kl.detach(),
        clipped=held_BT.sum(),
        tokens=response_BT.sum(),
    )
