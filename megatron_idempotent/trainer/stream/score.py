"""Rewards of groups, and the evaluation between two optimizer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from megatron_idempotent.controller import Fleet
from megatron_idempotent.rollout import Sample
from megatron_idempotent.trainer.names import HELD_OUT
from megatron_idempotent.trainer.rollout.requests import RequestMaker
from megatron_idempotent.trainer.task.prompts import Prompt
from megatron_idempotent.trainer.task.reward import Reward
from megatron_idempotent.trainer.task.tokenizer import TextTokenizer

# Evaluation draws from streams that no group uses: a group's stream is its id.
_EVALUATION_STREAM = 1 << 40


class Scorer:
    """The verifier on samples. Example: `await scorer(0, prompt, samples)`."""

    def __init__(self, reward: Reward, tokenizer: TextTokenizer) -> None:
        self._reward = reward
        self._tokenizer = tokenizer

    async def __call__(
        self, group_id: int, prompt: Prompt, samples: Sequence[Sample]
    ) -> Sequence[float]:
        """A reward per sample. In a thread: a verifier may take its time."""
        return await asyncio.to_thread(self._rewards, prompt, samples)

    def _rewards(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        return [
            float(
                self._reward(
                    self._tokenizer.decode(sample.tokens),
                    prompt.answer,
                    finished=sample.finish_reason == "stop",
                )
            )
            for sample in samples
        ]


class Evaluation:
    """Mean reward on held-out prompts, one sample each, at the training temperature."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestMaker,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        *,
        every: int,
        last: int,
    ) -> None:
        """`every` and `last` are versions; 0 evaluates at the start and at the end only."""
        self._fleet = fleet
        self._requests = requests
        self._scorer = scorer
        self._prompts = prompts
        self._every = every
        self._last = last

    async def __call__(self, version: int) -> Mapping[str, float]:
        """Metrics of a version; none where it is not due."""
        if not self.due(version):
            return {}
        rewards = await asyncio.gather(*(self._one(prompt, version) for prompt in self._prompts))
        return {
            HELD_OUT: sum(rewards) / len(rewards),
            "evaluation/solved_fraction": sum(each == 1.0 for each in rewards) / len(rewards),
        }

    def due(self, version: int) -> bool:
        """Returns whether a version is evaluated."""
        return version in (0, self._last) or (self._every > 0 and version % self._every == 0)

    async def _one(self, prompt: Prompt, version: int) -> float:
        stream = _EVALUATION_STREAM + version
        (request,) = self._requests.make(prompt, stream=stream, samples=1)
        sample = await self._fleet.sample(request)
        (reward,) = await self._scorer(0, prompt, [sample])
        return reward
