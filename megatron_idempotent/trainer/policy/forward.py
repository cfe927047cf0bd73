"""Log-probabilities of given tokens under the decoder, and the forward step Megatron calls.

Shapes: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_idempotent.trainer.config import LossConfig
from megatron_idempotent.trainer.policy.batch import Batch
from megatron_idempotent.trainer.policy.loss import LossParts, grpo_loss

# What Megatron's schedule expects of a loss under --calculate-per-token-loss: the sum, the number
# of tokens it was summed over, and what to report.
LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
ForwardStep = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, Callable[[Any], LossResult]]]


def causal_mask(positions: int) -> torch.Tensor:
    """Bool [1, 1, T, T], True where attention is forbidden: Megatron's convention."""
    return torch.ones(1, 1, positions, positions, dtype=torch.bool).triu(diagonal=1)


def decoder_logits(module: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of right-padded sequences; what follows a position does not reach it."""
    positions = tokens_BT.shape[1]
    position_ids_BT = torch.arange(positions).expand_as(tokens_BT)
    logits_BTV: torch.Tensor = module(tokens_BT, position_ids_BT, causal_mask(positions))
    return logits_BTV


def token_logprobs(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """Natural log-probabilities [B, T] of the targets under softmax(logits / temperature)."""
    logprobs_BTV = torch.log_softmax(logits_BTV.float() / temperature, dim=-1)
    return logprobs_BTV.gather(-1, targets_BT[..., None]).squeeze(-1)


def make_forward_step(
    loss_config: LossConfig, *, temperature: float, record: Callable[[LossParts], None]
) -> ForwardStep:
    """The `forward_step_func` for `train()`: one microbatch forward, and its loss.

    `record` receives the detached parts of every microbatch on this rank.
    """

    def forward_step(
        batches: Iterator[Batch], model: Any
    ) -> tuple[torch.Tensor, Callable[[Any], LossResult]]:
        batch = next(batches)

        def loss(logits_BTV: torch.Tensor) -> LossResult:
            parts = grpo_loss(
                token_logprobs(logits_BTV, batch.targets_BT, temperature=temperature),
                batch.old_logprobs_BT,
                batch.advantages_B,
                batch.loss_mask_BT,
                clip_low=loss_config.clip_low,
                clip_high=loss_config.clip_high,
                reference_logprobs_BT=batch.reference_logprobs_BT,
                kl_coefficient=loss_config.kl_coefficient,
            )
            record(parts)
            tokens = parts.tokens.to(torch.int32)  # the schedule adds it to an int32 in place
            report = torch.stack((parts.loss.detach(), parts.tokens.to(parts.loss.dtype)))
            return parts.loss, tokens, {"policy loss": report}

        return decoder_logits(model, batch.tokens_BT), loss

    return forward_step
