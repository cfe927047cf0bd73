"""Computes the GRPO objective, the off-policy correction, and the log-probs for both.

Shapes: B sequences, T positions, V vocabulary.

Behaviour log-probs are the engine's, under the weights that sampled. Proximal log-probs are
recomputed with the weights at the start of the optimizer step. They differ for stale samples, and
slightly for fresh ones, because an engine rounds differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

import megatron_idempotent
from megatron_idempotent import token_logprobs
from megatron_idempotent.rl.controller import LogprobsOf

from .batch import Batch
from .config import LossConfig


def grpo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    config: LossConfig,
    *,
    reference_logprobs_BT: torch.Tensor | None = None,
    weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the clipped policy-gradient loss with a KL penalty, summed over response tokens.

    ratio = exp(logprobs - old_logprobs)
    gain  = min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A), for an advantage A
    k3    = exp(reference - logprobs) - (reference - logprobs) - 1, which is never negative
    loss  = sum over response tokens of (kl_coefficient x k3 - gain)
    Denominator: none here. The caller divides by the response tokens on all ranks of one optimizer
    step.

    With `weights_BT` this is decoupled PPO: the old log-probs are under the weights at the start of
    the step, and each token's gain is multiplied by its weight, which gets no gradient. The weight
    is the importance ratio to the weights that sampled; see `importance_correction`. The KL penalty
    is not weighted.

    `advantages` are [B], or [B, T] if a row has several sequences. `loss_mask_BT` is 1.0 on
    response tokens and 0.0 elsewhere; where it is 0, all other tensors are ignored, even NaN.

    Returns:
        The loss, with a gradient, and without one `kl`, the penalty before it is multiplied by its
        coefficient, and `clip_fraction`, the number of tokens whose ratio was clipped. All are
        sums, as scalars, which the caller divides.

    Raises:
        ValueError: `kl_coefficient` is set without reference log-probs.
    """
    kl_coefficient = config.kl_coefficient
    if kl_coefficient and reference_logprobs_BT is None:
        raise ValueError(
            f"kl_coefficient is {kl_coefficient} and there are no reference log-probs; pass "
            "reference_logprobs_BT, or a coefficient of 0"
        )
    response_BT = loss_mask_BT > 0
    # Masked before exp(): a padding position may overflow, and inf x 0 in the backward is NaN.
    log_ratio_BT = torch.where(response_BT, logprobs_BT - old_logprobs_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain_BT = advantages if advantages.dim() == 2 else advantages[:, None]
    objective_BT = torch.minimum(ratio_BT * gain_BT, clipped_BT * gain_BT)
    if weights_BT is not None:
        objective_BT = objective_BT * torch.where(response_BT, weights_BT.detach(), 0.0)
    loss = -torch.where(response_BT, objective_BT, 0.0).sum()
    kl = torch.zeros_like(loss)
    if reference_logprobs_BT is not None:
        gap_BT = torch.where(response_BT, reference_logprobs_BT - logprobs_BT, 0.0)
        kl = (gap_BT.exp() - gap_BT - 1.0).sum()
        loss = loss + kl_coefficient * kl
    is_clipped_BT = (clipped_BT * gain_BT < ratio_BT * gain_BT) & response_BT
    return loss, {"kl": kl.detach(), "clip_fraction": is_clipped_BT.sum()}


# The largest exponent: exp() of more is useless, and a sum of exp() of this fits into float32.
_MOST = 80.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The result of `importance_correction`: token weights, a loss mask without rejected tokens,
    and metrics.

    Example: `correction.metrics["rejected"]`.
    """

    weights_BT: torch.Tensor
    """The weight of each token; 0 outside `loss_mask_BT`."""
    loss_mask_BT: torch.Tensor
    """The input mask without rejected tokens, which then do not count in the denominator."""
    metrics: Mapping[str, float]
    """Sums over the response tokens of the input mask, for the caller to divide by `tokens`.

    `tokens` is their number. `ratio` and `kl` are the sums of each token's own ratio and of its k3
    estimate of KL(behaviour || proximal). `rejected` counts tokens removed from the mask,
    `truncated` tokens whose weight is below their ratio, and `not_finite` tokens whose log-ratio is
    not finite. `largest_ratio` is a maximum, not a sum."""


@torch.no_grad()
def importance_correction(
    proximal_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    config: LossConfig,
) -> Correction:
    """Compute the importance weights of response tokens, in float64, from the ratio of their
    probabilities: exp(proximal - behaviour log-prob).

    By `loss.correction`, with `correction_low` and `correction_high`:

    none      weight = 1
    truncate  weight = min(ratio, high); `low` is not used
    mask      weight = ratio; a token whose ratio is outside [low, high] is rejected: its weight is
              0 and it leaves the mask

    With `correction_level` "sequence" all tokens of a sequence have ratio = exp(mean over its
    response tokens of proximal - behaviour). In every mode, tokens whose log-ratio is not finite
    are rejected, because they have no gradient; with "sequence", so is their entire sequence.

    `loss_mask_BT` is above 0 on response tokens; elsewhere the other tensors are ignored, even NaN.
    """
    mode, low, high = config.correction, config.correction_low, config.correction_high
    response_BT = loss_mask_BT > 0
    gap_BT = torch.where(response_BT, proximal_BT.double() - behaviour_BT.double(), 0.0)
    finite_BT = gap_BT.isfinite()
    measured_BT = response_BT & finite_BT
    own_BT = torch.where(finite_BT, gap_BT, 0.0).clamp(-_MOST, _MOST)
    log_ratio_BT, kept_BT = own_BT, measured_BT
    if config.correction_level == "sequence":
        tokens_B1 = response_BT.sum(1, keepdim=True).clamp(min=1)
        log_ratio_BT = (own_BT.sum(1, keepdim=True) / tokens_B1).expand_as(own_BT)
        kept_BT = response_BT & finite_BT.all(1, keepdim=True)
    ratio_BT = log_ratio_BT.exp()
    if mode == "mask":
        kept_BT = kept_BT & (ratio_BT >= low) & (ratio_BT <= high)
    weights_BT = torch.ones_like(ratio_BT) if mode == "none" else ratio_BT
    truncated_BT = kept_BT & (weights_BT > high) & (mode == "truncate")
    weights_BT = torch.where(truncated_BT, high, weights_BT)
    own_ratio_BT = torch.where(measured_BT, own_BT.exp(), 0.0)
    k3_BT = torch.where(measured_BT, own_ratio_BT - own_BT - 1.0, 0.0)
    values = {
        "tokens": response_BT.sum(),
        "ratio": own_ratio_BT.sum(),
        "kl": k3_BT.sum(),
        "rejected": (response_BT & ~kept_BT).sum(),
        "truncated": truncated_BT.sum(),
        "not_finite": (response_BT & ~measured_BT).sum(),
        "largest_ratio": own_ratio_BT.amax() if own_ratio_BT.numel() else own_ratio_BT.sum(),
    }
    # One copy from the device instead of seven.
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return Correction(
        weights_BT=torch.where(kept_BT, weights_BT, 0.0).to(
            torch.promote_types(proximal_BT.dtype, torch.float32)
        ),
        loss_mask_BT=torch.where(kept_BT, loss_mask_BT, torch.zeros_like(loss_mask_BT)),
        metrics=dict(zip(values, numbers, strict=True)),
    )


def with_logprobs(
    batch: Batch, logprobs: Mapping[LogprobsOf, torch.Tensor], config: LossConfig
) -> tuple[Batch, Mapping[str, float]]:
    """Return a copy of a batch of `pack_rows` to which the log-probs and weights that the loss
    needs are added; also return the metrics of the importance correction, {} without a correction.

    The copy has reference log-probs if there is a KL penalty. If old log-probs are recomputed, the
    copy's are those of the policy, and the copy has importance weights, and a loss mask without
    rejected tokens.

    Args:
        batch: the batch, whose old log-probs are the engine's.
        logprobs: the log-probs [B, T] of the batch's targets, for each model of
            `config.logprob_models`.
        config: the settings of the loss.
    """
    reference_BT = logprobs.get("reference")
    if config.kl_coefficient and config.kl_reference == "old":
        reference_BT = batch.old_logprobs_BT
    batch = dataclasses.replace(batch, reference_logprobs_BT=reference_BT)
    if config.old_logprobs != "recomputed":
        return batch, {}
    proximal_BT = logprobs["policy"]
    correction = importance_correction(
        proximal_BT, batch.old_logprobs_BT, batch.loss_mask_BT, config
    )
    corrected_batch = dataclasses.replace(
        batch,
        old_logprobs_BT=proximal_BT,
        loss_mask_BT=correction.loss_mask_BT,
        weights_BT=correction.weights_BT,
    )
    return corrected_batch, correction.metrics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogitsOf:
    """Computes log-probs from this rank's part of the logits, which may have only some of the
    vocabulary columns (tensor parallelism) and some of the positions (context parallelism).

    Example: `LogitsOf(temperature=0.7).logprobs(logits_BTV, targets_BT, mask_BT)`.
    """

    temperature: float
    """Sampling temperature, by which logits are divided."""
    tp_group: Any = None
    """Process group of the ranks that split the columns; None if every rank has all columns."""
    vocab_size: int | None = None
    """Vocabulary size without padding; None for all columns."""
    cuts_positions: bool = False
    """True if context-parallel ranks split the positions."""

    def logprobs(
        self,
        logits_BTV: torch.Tensor,
        targets_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        ownership: Literal["borrow", "consume"] = "borrow",
    ) -> torch.Tensor:
        """Return the targets' log-probs [B, T] at all positions of the rows, on every rank; 0 where
        the mask is 0.

        `targets_BT` and `mask_BT` are also entire rows. `cu_seqlens` has the positions at which the
        sequences of a pack begin and end. With `ownership="consume"`, the logits may be
        overwritten. A collective of the ranks that split columns or positions.
        """
        if self.cuts_positions:
            targets_BT = megatron_idempotent.step.own_positions(targets_BT, cu_seqlens=cu_seqlens)
            mask_BT = megatron_idempotent.step.own_positions(mask_BT, cu_seqlens=cu_seqlens)
        logprobs_here_BT = token_logprobs(
            logits=logits_BTV,
            targets=targets_BT,
            temperature=self.temperature,
            token_mask=mask_BT,
            tp_group=self.tp_group,
            vocab_size=self.vocab_size,
            ownership=ownership,
        ).logprob
        if not self.cuts_positions:
            return logprobs_here_BT
        return megatron_idempotent.step.all_positions(logprobs_here_BT, cu_seqlens=cu_seqlens)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The GRPO loss of a microbatch, computed from logits, for `TrainStep`.

    Microbatches come from `Batch.tensors()`, or are packs of `Batch.sequences()`. The step divides
    the gradient and the metrics by the response tokens of all ranks in the optimizer step.

    Example: `step.begin(PolicyLoss(config.loss, of=LogitsOf(temperature=1.0)), …)`.
    """

    config: LossConfig
    of: LogitsOf
    """Computes log-probs from logits."""
    kind: ClassVar[Literal["token"]] = "token"
    #: Every context-parallel rank computes the same loss, from entire rows.
    context_parallel: ClassVar[Literal["whole"]] = "whole"
    normalizers: ClassVar[Mapping[str, Literal["tokens", "none"]]] = {
        "kl": "tokens",
        "clip_fraction": "tokens",
        "positions": "none",
    }

    def __call__(
        self, logits_BTV: torch.Tensor, microbatch: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss, a scalar, and metrics, as sums over the microbatch's response tokens.

        Raises:
            ValueError: the objective needs recomputed log-probs, and the microbatch has none.
        """
        pack, advantages = microbatch.get("pack"), microbatch["advantages"]
        if pack is None:
            loss_mask_BT = microbatch["token_mask"][:, 1:]
        else:
            # Shifting a pack's token mask would move the next sequence's first entry to this one's
            # end.
            loss_mask_BT = microbatch["response_mask"]
            advantages = pack.expand(advantages)[None]
        if self.config.old_logprobs == "recomputed" and "weights" not in microbatch:
            raise ValueError(
                f"loss.old_logprobs is 'recomputed', loss.correction is "
                f"{self.config.correction!r}, and the batch has no weights_BT; recompute the "
                "log-probs and pass the batch through trainer.loss.with_logprobs()"
            )
        logprobs_BT = self.of.logprobs(
            logits_BTV,
            microbatch["targets"],
            loss_mask_BT > 0,
            cu_seqlens=None if pack is None else pack.cu_seqlens,
            ownership="consume",  # the logits are not used again
        )
        loss, metrics = grpo_loss(
            logprobs_BT,
            microbatch["old_logprobs"],
            advantages,
            loss_mask_BT,
            self.config,
            reference_logprobs_BT=microbatch.get("reference_logprobs"),
            weights_BT=microbatch.get("weights"),
        )
        return loss, {**metrics, "positions": microbatch["input_ids"].numel()}
