"""Group-relative policy optimisation, top to bottom as in the paper.

This runs on every rank. Each rank takes its share of the prompts, in whole groups; the policy's
`train` and the sums of `ranks` are where the ranks meet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_idempotent.controller.protocol import Logger
from megatron_idempotent.trainer import ranks
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.metrics import Stopwatch, evaluation_metrics, rollout_metrics
from megatron_idempotent.trainer.parts import Policy, Sampler
from megatron_idempotent.trainer.policy.batch import pack
from megatron_idempotent.trainer.rollout.advantages import group_advantages
from megatron_idempotent.trainer.rollout.records import Group, ScoredGroup
from megatron_idempotent.trainer.task.prompts import Prompt, PromptSet, rollout_prompts
from megatron_idempotent.trainer.task.reward import Reward

# Evaluation draws from streams that no rollout uses: a rollout's stream is its index.
_EVALUATION_STREAM = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of the loop. `positions` is the length of the training sequences in tokens.

    `publish` and `save` are called with the number of rollouts that are done, and are collective:
    the one brings the weights to what samples, the other writes a checkpoint.
    Example: `train(config, prompts, parts, first_rollout=0)`.
    """

    sampler: Sampler
    publish: Callable[[int], None]
    reward: Reward
    policy: Policy
    logger: Logger
    save: Callable[[int], None]
    positions: int
    pad_id: int


def train(config: Config, prompts: PromptSet, parts: Parts, *, first_rollout: int) -> None:
    """Run rollouts `first_rollout` to the last. Collective."""
    parts.publish(first_rollout)
    if first_rollout == 0:
        parts.logger.log(evaluate(config, prompts, parts, done=0), step=0)
    for index in range(first_rollout, config.run.rollouts):
        watch = Stopwatch()
        asked = rollout_prompts(
            prompts.train, index=index, count=config.rollout.prompts, seed=config.run.seed
        )
        with watch.phase("generation"):
            groups = parts.sampler.sample(
                ranks.share(asked), samples=config.rollout.group_size, stream=index
            )
        with watch.phase("advantages"):
            scored = score(groups, parts.reward, normalize_std=config.loss.normalize_std)
            batch = pack(scored, positions=parts.positions, pad_id=parts.pad_id)
        with watch.phase("policy_training"):
            step = parts.policy.train(batch, index=index)

        done = index + 1
        with watch.phase("sync_weights"):
            parts.publish(done)
        metrics = rollout_metrics(scored, step)
        if _due(done, config.evaluation.every, config.run.rollouts):
            with watch.phase("evaluation"):
                metrics |= evaluate(config, prompts, parts, done=done)
        if config.run.checkpoint_every and _due(
            done, config.run.checkpoint_every, config.run.rollouts
        ):
            with watch.phase("checkpoint"):
                parts.save(done)
        measured = watch.timings(step.response_tokens) | watch.memory()
        parts.logger.log(metrics | measured, step=done)


def score(
    groups: Sequence[Group], reward: Reward, *, normalize_std: bool
) -> tuple[ScoredGroup, ...]:
    """Rewards by the verifier, advantages relative to the group. Local to the rank."""
    scored = []
    for group in groups:
        rewards = tuple(
            reward(sample.text, group.prompt.answer, finished=sample.finished)
            for sample in group.samples
        )
        advantages = group_advantages(rewards, normalize_std=normalize_std)
        scored.append(ScoredGroup(group=group, rewards=rewards, advantages=advantages))
    return tuple(scored)


def evaluate(config: Config, prompts: PromptSet, parts: Parts, *, done: int) -> Mapping[str, float]:
    """Mean reward on held-out prompts, one sample each, at the training temperature. Collective."""
    held_out: tuple[Prompt, ...] = prompts.held_out[: config.evaluation.prompts]
    started = time.perf_counter()
    groups = parts.sampler.sample(
        ranks.share(held_out), samples=1, stream=_EVALUATION_STREAM + done
    )
    scored = score(groups, parts.reward, normalize_std=False)
    return evaluation_metrics(scored, seconds=time.perf_counter() - started)


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)
