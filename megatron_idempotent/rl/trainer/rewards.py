"""Turns prompts into requests, and samples into rewards, advantages and batches."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_idempotent.rl.controller import Fleet, LogprobsOf, RolloutGroup
from megatron_idempotent.rl.engines import Request, Sample
from megatron_idempotent.rl.metrics.names import HELD_OUT
from megatron_idempotent.rl.trainer.task.prompts import Prompt
from megatron_idempotent.rl.trainer.task.reward import Reward, Verifier
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

from .batch import Batch, pack_rows
from .config import Config
from .loss import with_logprobs

# Keeps rounding differences of rewards from being scaled up to unit variance.
_SMALLEST_STD = 1e-4


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> tuple[float, ...]:
    """Return each sample's advantage: reward - group mean, optionally divided by (std + 1e-4).

    The standard deviation's denominator is the group size. If all rewards
    are equal, all advantages are 0.

    Example: `group_advantages((1.0, 0.0), normalize_std=False)` is `(0.5, -0.5)`.
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return tuple(value / (std + _SMALLEST_STD) for value in centred)


def make_requests(
    config: Config, tokenizer: TextTokenizer, prompt: Prompt, *, stream: int, samples: int
) -> list[Request]:
    """Make `samples` requests for a prompt, each with its own seed.

    A request's seed is a hash of the run's seed, the stream, the prompt's row and the sample's
    index. A different `stream`, such as the next rollout's index, gives different seeds.
    """
    tokens, requests = tokenizer.encode_prompt(prompt.text), []
    for name in (f"{stream}/{prompt.row}/{sample}" for sample in range(samples)):
        digest = hashlib.blake2b(f"{config.run.seed}/{name}".encode(), digest_size=8).digest()
        request = Request(
            id=name,
            prompt=tokens,
            max_tokens=config.rollout.max_response_tokens,
            stop_tokens=tokenizer.end_ids,
            temperature=config.rollout.temperature,
            seed=int.from_bytes(digest, "big") >> 1,  # engines need an int64
        )
        requests.append(request)
    return requests


#: The first stream of evaluations; rollouts and groups use lower numbers.
EVALUATION_STREAM = 1 << 40


class Scorer:
    """Scores the samples of a prompt with the verifier, a reward function. Example: `await
    scorer(0, prompt, samples)`.
    """

    def __init__(self, reward: Reward, tokenizer: TextTokenizer) -> None:
        self._verifier, self._tokenizer = Verifier(reward), tokenizer

    async def __call__(
        self, group_id: int, prompt: Prompt, samples: Sequence[Sample]
    ) -> Sequence[float]:
        """Return a reward per sample; the verifier runs in a thread, because it may be slow."""
        return await asyncio.to_thread(self.rewards, prompt, samples)

    def rewards(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[float, ...]:
        """Return the verifier's reward for each sample. The verifier gets the sample's text, and
        whether it ended with an end token.

        Raises:
            ConfigError: a reward is not a number from 0 to 1, such as NaN.
            Exception: the verifier's error.
        """
        return tuple(
            self._verifier.score(
                self._tokenizer.decode(sample.tokens),
                prompt,
                finished=sample.finish_reason == "stop",
            )
            for sample in samples
        )

    def group(self, prompt: Prompt, samples: Sequence[Sample]) -> RolloutGroup:
        """Score the samples of a prompt, and return them with their rewards as a `RolloutGroup`;
        raises as `rewards` does.
        """
        rewards = self.rewards(prompt, samples)
        return RolloutGroup(id=prompt.row, prompt=prompt, samples=tuple(samples), rewards=rewards)


def group_sums(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the sum of rewards, and the numbers of samples, solved samples, groups and tied groups
    (all rewards are equal), for `group_means`.

    Sums of several ranks can be added first.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward": sum(rewards),
        "solved": float(sum(reward == 1.0 for reward in rewards)),
        "samples": float(len(rewards)),
        "tied": float(sum(len(set(group.rewards)) == 1 for group in groups)),
        "groups": float(len(groups)),
    }


def group_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward and the fractions of solved samples and of tied groups, from the sums
    of `group_sums`.

    A sample with reward 1 is solved. A group with equal rewards is tied: it has no gradient.
    """
    return {
        "reward": sums["reward"] / sums["samples"],
        "solved_fraction": sums["solved"] / sums["samples"],
        "tied_group_fraction": sums["tied"] / sums["groups"],
    }


def due(completed: int, every: int, last: int) -> bool:
    """Return whether a periodic action is due after `completed` rollouts: after every `every`
    rollouts (0: never), and after the last.
    """
    return completed == last or (every > 0 and completed % every == 0)


def evaluation_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward and the fraction of solved samples on held-out prompts, from the sums
    of `group_sums`.
    """
    return {
        HELD_OUT: sums["reward"] / sums["samples"],
        "evaluation/solved_fraction": sums["solved"] / sums["samples"],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures the mean reward on held-out prompts, with one sample per prompt at the training
    temperature.

    Example: `metrics = await evaluation(40)`.
    """

    config: Config
    fleet: Fleet
    tokenizer: TextTokenizer
    scorer: Scorer
    held_out: Sequence[Prompt]
    """The held-out prompts, of which the first `evaluation.prompts` are used."""

    async def __call__(self, version: int) -> Mapping[str, float]:
        """Sample the held-out prompts with the engines, whose weights have this version. Return the
        mean reward and the fraction of solved samples as metrics; {} if no evaluation of this
        version is due.
        """
        if not self.due(version):
            return {}
        prompts = self.held_out[: self.config.evaluation.prompts]
        drawn = (self._evaluate_prompt(prompt, version) for prompt in prompts)
        return evaluation_means(group_sums(await asyncio.gather(*drawn)))

    def due(self, version: int) -> bool:
        """Return whether the weights of this version are to be evaluated: the first, the last, and
        those after every `evaluation.every` rollouts.
        """
        every = self.config.evaluation.every * self.config.optimizer.steps_per_rollout
        return version == 0 or due(version, every, self.config.last_version)

    async def _evaluate_prompt(self, prompt: Prompt, version: int) -> RolloutGroup:
        stream = EVALUATION_STREAM + version
        (request,) = make_requests(self.config, self.tokenizer, prompt, stream=stream, samples=1)
        sample = await self.fleet.sample(request)
        return await asyncio.to_thread(self.scorer.group, prompt, [sample])


@dataclasses.dataclass(frozen=True, slots=True)
class GrpoRecipe:
    """Implements `controller.Recipe` for GRPO: makes advantages and batches of groups of samples.

    Example: `recipe.batch(groups, recipe.inputs(groups), {})`.
    """

    config: Config
    tokenizer: TextTokenizer
    positions: int
    """The length T of training sequences."""
    # By group, until its step is reported; a repeated step overwrites its entry.
    _corrections: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def rejects(self, group: RolloutGroup) -> str:
        """Return the reason to drop a group, if all its rewards are equal and
        `controller.drop_tied` is set; else return "", which keeps the group.
        """
        if not self.config.controller.drop_tied or len(set(group.rewards)) > 1:
            return ""
        samples, reward = len(group.rewards), group.rewards[0]
        return f"tied: task.reward {self.config.task.reward} gave {samples} samples {reward:g} each"

    def inputs(self, groups: Sequence[RolloutGroup]) -> Batch:
        """Make a batch with a row for each sample of the groups, with advantages and the engine's
        log-probs.
        """
        rows = []
        for group in groups:
            prompt = self.tokenizer.encode_prompt(group.prompt.text)
            normalize_std = self.config.loss.normalize_std
            advantages = group_advantages(group.rewards, normalize_std=normalize_std)
            samples = zip(group.samples, advantages, strict=True)
            rows += [(prompt, sample, advantage) for sample, advantage in samples]
        return pack_rows(
            rows,
            positions=self.positions,
            pad_id=self.tokenizer.pad_id,
            replays=self.config.rollout.router_replay != "off",
        )

    def batch(
        self,
        groups: Sequence[RolloutGroup],
        inputs: Any,
        logprobs: Mapping[LogprobsOf, torch.Tensor],
    ) -> Batch:
        """Return the batch `inputs` with reference log-probs and importance weights added, if the
        loss needs them.
        """
        batch, correction = with_logprobs(inputs, logprobs, self.config.loss)
        # One entry per call, under its first group; a repeated step overwrites it.
        self._corrections[groups[0].id] = correction
        return batch

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Return metrics of the groups of one optimizer step, most of them means over samples or
        groups.
        """
        sums = group_sums(groups)
        samples, means = sums["samples"], {}
        # Means of corrections over response tokens; none without recomputed log-probs.
        parts = [part for group in groups if (part := self._corrections.pop(group.id, {}))]
        if tokens := sum(part["tokens"] for part in parts):
            for name in ("ratio", "kl", "rejected", "truncated", "not_finite"):
                means[f"correction/{name}"] = sum(part[name] for part in parts) / tokens
            means["correction/largest_ratio"] = max(part["largest_ratio"] for part in parts)
        mixed = sum(len(set(sample.versions)) > 1 for group in groups for sample in group.samples)
        return {
            **means,
            **group_means(sums),
            "response_length": sum(group.tokens for group in groups) / samples,
            "failed_samples": float(sum(group.failed for group in groups)),
            "mixed_version_fraction": mixed / samples,
        }
