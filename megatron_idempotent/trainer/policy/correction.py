"""Importance correction: samples of other weights than those that train on them.

Behaviour log-probs are those of the weights that sampled, as the engine gave them; proximal ones
are recomputed with the weights that the optimizer step starts from. They differ where the samples
are stale, and a little even where they are not: an engine rounds in its own ways.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import torch

from megatron_idempotent.trainer.config import LossConfig
from megatron_idempotent.trainer.policy.batch import Batch

Mode = Literal["none", "truncate", "mask"]
"""Ratios weigh nothing; weigh up to a bound; weigh, and those outside two bounds are rejected."""

Level = Literal["token", "sequence"]
"""The ratio of a token is its own, or the geometric mean of those of its sequence."""

# exp() of more than that is of no use to anyone, and a sum of it still fits into float32.
_MOST = 80.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The corrected inputs of a loss, and metrics. Example: `correction.metrics["rejected"]`.

    `metrics` are sums over the response tokens that came in, to be divided by those of all ranks:
    `tokens`, how many these are; `ratio` and `kl`, the ratio and the k3 estimate of
    KL(behaviour || proximal), of each token on its own; `rejected`, out of the mask now;
    `truncated`, with a smaller weight than their ratio; `not_finite`, of the rejected those whose
    log-ratio is no number. `largest_ratio` is a maximum, not a sum.
    """

    weights_BT: torch.Tensor
    """0 outside `loss_mask_BT`."""
    loss_mask_BT: torch.Tensor
    """The one that came in, without what was rejected: it leaves the denominator too."""
    metrics: Mapping[str, float]


@torch.no_grad()
def importance_correction(
    proximal_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    mode: Mode,
    low: float,
    high: float,
    level: Level,
) -> Correction:
    """Weights of response tokens: ratio = exp(proximal - behaviour), in float64.

    none      weight = 1
    truncate  weight = min(ratio, high); `low` plays no part
    mask      weight = ratio; what lies outside [low, high] is rejected: it weighs 0 and leaves the
              mask

    With level "sequence", ratio = exp(mean over a sequence's response tokens of proximal -
    behaviour), for all of its tokens alike. Whatever the mode, tokens without a finite log-ratio
    are rejected (with their sequence, by level "sequence"): no gradient can be made of them.

    `loss_mask_BT` is above 0 on response tokens; what the others hold elsewhere has no influence,
    NaN included. Errors: `ValueError` for an unknown mode or level, or bounds that are not
    0 <= low <= high.
    """
    _check(mode, level, low, high)
    response_BT = loss_mask_BT > 0
    gap_BT = torch.where(response_BT, proximal_BT.double() - behaviour_BT.double(), 0.0)
    finite_BT = gap_BT.isfinite()
    measured_BT = response_BT & finite_BT
    own_BT = torch.where(finite_BT, gap_BT, 0.0).clamp(-_MOST, _MOST)
    log_ratio_BT, kept_BT = own_BT, measured_BT
    if level == "sequence":
        tokens_B1 = response_BT.sum(1, keepdim=True).clamp(min=1)
        log_ratio_BT = (own_BT.sum(1, keepdim=True) / tokens_B1).expand_as(own_BT)
        kept_BT = response_BT & finite_BT.all(1, keepdim=True)
    ratio_BT = log_ratio_BT.exp()
    if mode == "mask":
        kept_BT = kept_BT & (ratio_BT >= low) & (ratio_BT <= high)
    weights_BT = torch.ones_like(ratio_BT) if mode == "none" else ratio_BT
    truncated_BT = kept_BT & (weights_BT > high) & (mode == "truncate")
    weights_BT = torch.where(truncated_BT, high, weights_BT)
    return Correction(
        weights_BT=torch.where(kept_BT, weights_BT, 0.0).to(
            torch.promote_types(proximal_BT.dtype, torch.float32)
        ),
        loss_mask_BT=torch.where(kept_BT, loss_mask_BT, torch.zeros_like(loss_mask_BT)),
        metrics=_measured(response_BT, measured_BT, kept_BT, truncated_BT, own_BT),
    )


def corrected(
    batch: Batch, proximal_BT: torch.Tensor, config: LossConfig
) -> tuple[Batch, Mapping[str, float]]:
    """A batch with recomputed old log-probs, as `PolicyLoss` needs it, and what was corrected.

    `batch.old_logprobs_BT` are the behaviour's, as `pack` puts them there; `proximal_BT` takes
    their place. Where the KL penalty ties to the policy that sampled, take the reference from the
    batch before.
    """
    found = importance_correction(
        proximal_BT,
        batch.old_logprobs_BT,
        batch.loss_mask_BT,
        mode=config.correction,
        low=config.correction_low,
        high=config.correction_high,
        level=config.correction_level,
    )
    new = dataclasses.replace(
        batch,
        old_logprobs_BT=proximal_BT,
        loss_mask_BT=found.loss_mask_BT,
        weights_BT=found.weights_BT,
    )
    return new, found.metrics


def _measured(
    response_BT: torch.Tensor,
    measured_BT: torch.Tensor,
    kept_BT: torch.Tensor,
    truncated_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
) -> Mapping[str, float]:
    log_ratio_BT = torch.where(measured_BT, log_ratio_BT, 0.0)
    ratio_BT = torch.where(measured_BT, log_ratio_BT.exp(), 0.0)
    k3_BT = torch.where(measured_BT, ratio_BT - log_ratio_BT - 1.0, 0.0)
    largest = ratio_BT.amax() if ratio_BT.numel() else ratio_BT.sum()
    values = {
        "tokens": response_BT.sum(),
        "ratio": ratio_BT.sum(),
        "kl": k3_BT.sum(),
        "rejected": (response_BT & ~kept_BT).sum(),
        "truncated": truncated_BT.sum(),
        "not_finite": (response_BT & ~measured_BT).sum(),
        "largest_ratio": largest,
    }
    # One copy from the device, not seven.
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _check(mode: str, level: str, low: float, high: float) -> None:
    for name, value, allowed in (("mode", mode, Mode), ("level", level, Level)):
        if value not in get_args(allowed):
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(get_args(allowed))}")
    if not 0 <= low <= high:  # NaN compares false
        raise ValueError(f"low is {low} and high is {high}; allowed: 0 <= low <= high")
