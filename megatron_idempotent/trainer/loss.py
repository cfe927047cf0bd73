"""The GRPO objective, its correction for older weights, and the forward that it is computed from.

Shapes: B sequences, T positions, V vocabulary.

Behaviour log-probs are those of the weights that sampled, as the engine gave them; proximal ones
are recomputed with the weights that the optimizer step starts from. They differ where the samples
are stale, and a little even where they are not: an engine rounds in its own ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

import megatron_idempotent
from megatron_idempotent import token_logprobs

from .batch import Batch
from .config import LossConfig


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
    advantages: torch.Tensor,
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

    `advantages` are [B], or [B, T] where a row has several sequences. `loss_mask_BT` is 1.0 on
    response tokens and 0.0 elsewhere; what the other tensors hold there has no influence, NaN
    included. Errors: `ValueError` for a KL coefficient without a reference.
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
    held_BT = (clipped_BT * gain_BT < ratio_BT * gain_BT) & response_BT
    return LossParts(
        loss=loss,
        kl=kl.detach(),
        clipped=held_BT.sum(),
        tokens=response_BT.sum(),
    )


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


def causal_mask(positions: int) -> torch.Tensor:
    """Bool [1, 1, T, T] on the device, True where attention is forbidden: Megatron's convention."""
    everywhere = torch.ones(1, 1, positions, positions, dtype=torch.bool, device="cuda")
    return everywhere.triu(diagonal=1)


def decoder_logits(module: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of right-padded sequences; what follows a position does not reach it.

    Of T and V they are this rank's positions and columns; on a pipeline stage before the last,
    hidden states.

    A rank's device is "cuda": the CPU runtime makes that the CPU.
    """
    positions = tokens_BT.shape[1]
    position_ids_BT = torch.arange(positions, device="cuda").expand_as(tokens_BT)
    mine_BT = megatron_idempotent.own_positions(tokens_BT)
    places_BT = megatron_idempotent.own_positions(position_ids_BT)
    logits_BTV: torch.Tensor = module(mine_BT, places_BT, causal_mask(positions))
    return logits_BTV


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogitsOf:
    """Says what a rank's logits are of, and computes log-probs of them.

    Example: `LogitsOf(temperature=0.7).logprobs(logits_BTV, targets_BT, mask_BT)`.
    """

    temperature: float
    tp_group: Any = None
    """Ranks that have the columns of the logits between them."""
    vocab_size: int | None = None
    """Tokens, where those ranks pad the vocabulary."""
    cuts_positions: bool = False
    """Context-parallel ranks have the positions of the logits between them."""

    def logprobs(
        self,
        logits_BTV: torch.Tensor,
        targets_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        ownership: Literal["borrow", "consume"] = "borrow",
    ) -> torch.Tensor:
        """Log-probs [B, T] of whole rows, 0 where the mask is.

        `cu_seqlens` are where the sequences of a pack begin and end. Collective over
        tensor-parallel ranks, which have the columns of the logits between them, and
        context-parallel ones, which have the positions.
        """
        if self.cuts_positions:
            targets_BT = megatron_idempotent.own_positions(targets_BT, cu_seqlens=cu_seqlens)
            mask_BT = megatron_idempotent.own_positions(mask_BT, cu_seqlens=cu_seqlens)
        found = token_logprobs(
            logits=logits_BTV,
            targets=targets_BT,
            temperature=self.temperature,
            token_mask=mask_BT,
            tp_group=self.tp_group,
            vocab_size=self.vocab_size,
            ownership=ownership,
        ).logprob
        if not self.cuts_positions:
            return found
        return megatron_idempotent.all_positions(found, cu_seqlens=cu_seqlens)


def forward(module: Any, microbatch: Mapping[str, Any]) -> torch.Tensor:
    """Logits [B, T, V] of a microbatch: of rows, or of a pack, whose B is 1."""
    if "pack" in microbatch:
        return megatron_idempotent.gpt_forward(module, microbatch)
    return decoder_logits(module, microbatch["input_ids"])


class PolicyLoss:
    """The GRPO objective as a split step asks for it, over `Batch.tensors()`, or packs of
    `Batch.sequences()`.

    Its gradient is divided by the response tokens of all ranks in the optimizer step, and so are
    its metrics. Example: `step.begin(PolicyLoss(config.loss, of=LogitsOf(temperature=1.0)), …)`.
    """

    kind: Literal["token"] = "token"
    #: Context-parallel ranks compute it of whole rows, all the same.
    context_parallel: Literal["whole"] = "whole"

    def __init__(self, config: LossConfig, *, of: LogitsOf) -> None:
        """Take `of`, which says what the logits are of."""
        self.normalizers: Mapping[str, Literal["tokens", "none"]] = {
            "kl": "tokens",
            "clip_fraction": "tokens",
            "positions": "none",
        }
        self._config = config
        self._of = of

    @property
    def needs_recomputed_logprobs(self) -> bool:
        """True if batches must carry old log-probs of the weights that the step starts from."""
        return self._config.old_logprobs == "recomputed"

    def __call__(
        self, logits_BTV: torch.Tensor, microbatch: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Sums over the response tokens of a microbatch.

        Errors: `ValueError` where it needs recomputed log-probs and the microbatch has none.
        """
        pack, advantages = microbatch.get("pack"), microbatch["advantages"]
        if pack is None:
            loss_mask_BT = microbatch["token_mask"][:, 1:]
        else:
            # Shifting the token mask here would give a sequence's last place the next one's first.
            loss_mask_BT = microbatch["response_mask"]
            advantages = pack.expand(advantages)[None]
        if self.needs_recomputed_logprobs and "weights" not in microbatch:
            raise ValueError(
                f"loss.old_logprobs is 'recomputed', loss.correction is "
                f"{self._config.correction!r}, and the batch has no weights_BT; recompute the "
                "log-probs and pass the batch through correction.corrected()"
            )
        logprobs_BT = self._of.logprobs(
            logits_BTV,
            microbatch["targets"],
            loss_mask_BT > 0,
            cu_seqlens=None if pack is None else pack.cu_seqlens,
            ownership="consume",  # nobody else reads them
        )
        parts = grpo_loss(
            logprobs_BT,
            microbatch["old_logprobs"],
            advantages,
            loss_mask_BT,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            reference_logprobs_BT=microbatch.get("reference_logprobs"),
            kl_coefficient=self._config.kl_coefficient,
            weights_BT=microbatch.get("weights"),
        )
        positions = microbatch["input_ids"].numel()
        return parts.loss, {"kl": parts.kl, "clip_fraction": parts.clipped, "positions": positions}
