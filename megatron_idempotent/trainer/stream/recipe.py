"""The training data of a group in the asynchronous trainer: GRPO, corrected for older weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_idempotent.controller import LogprobsOf, RolloutGroup
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.policy.batch import Batch, Row, pack_rows
from megatron_idempotent.trainer.policy.correction import corrected
from megatron_idempotent.trainer.rollout.advantages import group_advantages
from megatron_idempotent.trainer.task.tokenizer import TextTokenizer


class GrpoRecipe:
    """A `controller.Recipe`. Example: `recipe.batch(group, recipe.inputs(group), {})`."""

    def __init__(self, config: Config, tokenizer: TextTokenizer, *, positions: int) -> None:
        """`positions` is the length of the training sequences in tokens."""
        self._config = config
        self._tokenizer = tokenizer
        self._positions = positions
        # By group, until its step is reported: one that is taken again counts once.
        self._corrections: dict[int, Mapping[str, float]] = {}

    def rejects(self, group: RolloutGroup) -> str:
        """Groups without a spread of rewards have no advantages, and may be left out."""
        tied = len(set(group.rewards)) == 1
        return "tied" if tied and self._config.controller.drop_tied else ""

    def inputs(self, groups: Sequence[RolloutGroup]) -> Batch:
        """One row per sample, with the log-probs that it was drawn with."""
        rows = [row for group in groups for row in self._rows(group)]
        return pack_rows(rows, positions=self._positions, pad_id=self._tokenizer.pad_id)

    def batch(
        self,
        groups: Sequence[RolloutGroup],
        inputs: Any,
        logprobs: Mapping[LogprobsOf, torch.Tensor],
    ) -> Batch:
        """The batch with what its loss needs beside the rewards."""
        loss = self._config.loss
        batch: Batch = inputs
        reference_BT = logprobs.get("reference")
        if loss.kl_coefficient and loss.kl_reference == "old":
            reference_BT = batch.old_logprobs_BT
        batch = dataclasses.replace(batch, reference_logprobs_BT=reference_BT)
        if loss.old_logprobs != "recomputed":
            return batch
        batch, found = corrected(batch, logprobs["policy"], loss)
        # All that train together have one measure; of a step taken again the last one counts.
        self._corrections[groups[0].id] = found
        return batch

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Means over the samples, or groups, of one optimizer step."""
        rewards = [reward for group in groups for reward in group.rewards]
        samples = len(rewards)
        return {
            **_correction_metrics([self._corrections.pop(each.id, {}) for each in groups]),
            "reward": sum(rewards) / samples,
            "solved_fraction": sum(reward == 1.0 for reward in rewards) / samples,
            "tied_group_fraction": sum(len(set(each.rewards)) == 1 for each in groups)
            / len(groups),
            "response_length": sum(group.tokens for group in groups) / samples,
            "failed_samples": float(sum(group.failed for group in groups)),
            "mixed_version_fraction": sum(
                len(set(sample.versions)) > 1 for group in groups for sample in group.samples
            )
            / samples,
        }

    def _rows(self, group: RolloutGroup) -> list[Row]:
        prompt = self._tokenizer.encode_prompt(group.prompt.text)
        normalize_std = self._config.loss.normalize_std
        advantages = group_advantages(group.rewards, normalize_std=normalize_std)
        return [(prompt, *each) for each in zip(group.samples, advantages, strict=True)]


def _correction_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the response tokens that came in; nothing where nothing was recomputed."""
    parts = [part for part in parts if part]
    tokens = sum(part["tokens"] for part in parts)
    if not tokens:
        return {}
    names = ("ratio", "kl", "rejected", "truncated", "not_finite")
    means = {f"correction/{name}": sum(part[name] for part in parts) / tokens for name in names}
    return means | {"correction/largest_ratio": max(part["largest_ratio"] for part in parts)}
