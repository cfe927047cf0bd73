"""Records that go from the sampler to the loss."""

from __future__ import annotations

import dataclasses

from megatron_idempotent.trainer.task.prompts import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response. `tokens` holds at most `max_response_tokens` ids, the end token included.

    `logprobs` has one entry per token: its natural log-probability under the tempered
    distribution that it was drawn from; `versions` says with which weights. `finished` says that
    the last token is an end token.
    Example: `Sample(tokens=(5, 4, 3, 1), logprobs=(-3.1, -3.0, -3.2, -3.1), versions=(2, 2, 2, 2),
    text="c b a", finished=True)`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finished: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one prompt, in the order of their sample index.

    Example: `Group(prompt=prompt, prompt_tokens=(7, 3, 4, 5, 2), samples=(a, b))`.
    """

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group with one reward and one advantage per sample.

    Example: `ScoredGroup(group=group, rewards=(1.0, 0.0), advantages=(1.0, -1.0))`.
    """

    group: Group
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
