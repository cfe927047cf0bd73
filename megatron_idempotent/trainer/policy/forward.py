"""The forward that `TrainStep` runs per microbatch, and its loss.

Shapes: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from megatron_idempotent import token_logprobs
from megatron_idempotent.trainer.config import LossConfig
from megatron_idempotent.trainer.policy.loss import grpo_loss


def causal_mask(positions: int) -> torch.Tensor:
    """Bool [1, 1, T, T] on the device, True where attention is forbidden: Megatron's convention."""
    everywhere = torch.ones(1, 1, positions, positions, dtype=torch.bool, device="cuda")
    return everywhere.triu(diagonal=1)


def decoder_logits(module: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of right-padded sequences; what follows a position does not reach it.

    A rank's device is "cuda": the CPU runtime makes that the CPU.
    """
    positions = tokens_BT.shape[1]
    position_ids_BT = torch.arange(positions, device="cuda").expand_as(tokens_BT)
    logits_BTV: torch.Tensor = module(tokens_BT, position_ids_BT, causal_mask(positions))
    return logits_BTV


def forward(module: Any, microbatch: Mapping[str, Any]) -> torch.Tensor:
    """Logits [B, T, V] of a microbatch."""
    return decoder_logits(module, microbatch["input_ids"])


class PolicyLoss:
    """The GRPO objective as a split step asks for it, over `Batch.tensors()`.

    Its gradient is divided by the response tokens of all ranks in the optimizer step, and so are
    its metrics. Example: `step.begin(PolicyLoss(config.loss, temperature=1.0), …)`.
    """

    kind: Literal["token"] = "token"

    def __init__(self, config: LossConfig, *, temperature: float) -> None:
        self.normalizers: Mapping[str, Literal["tokens"]] = {
            "kl": "tokens",
            "clip_fraction": "tokens",
        }
        self._config = config
        self._temperature = temperature

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
        loss_mask_BT = microbatch["token_mask"][:, 1:]
        if self.needs_recomputed_logprobs and "weights" not in microbatch:
            raise ValueError(
                f"loss.old_logprobs is 'recomputed', loss.correction is "
                f"{self._config.correction!r}, and the batch has no weights_BT; recompute the "
                "log-probs and pass the batch through correction.corrected()"
            )
        stats = token_logprobs(
            logits=logits_BTV,
            targets=microbatch["targets"],
            temperature=self._temperature,
            token_mask=loss_mask_BT > 0,
            ownership="consume",  # nobody else reads them
        )
        parts = grpo_loss(
            stats.logprob,
            microbatch["old_logprobs"],
            microbatch["advantages"],
            loss_mask_BT,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            reference_logprobs_BT=microbatch.get("reference_logprobs"),
            kl_coefficient=self._config.kl_coefficient,
            weights_BT=microbatch.get("weights"),
        )
        return parts.loss, {"kl": parts.kl, "clip_fraction": parts.clipped}
