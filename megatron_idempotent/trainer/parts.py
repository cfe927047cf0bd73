"""The parts of the loop, as protocols: each can be replaced without touching the others.

Shapes and units are in the docstrings; every method marked collective runs on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from megatron_idempotent.trainer.policy.batch import Batch
from megatron_idempotent.trainer.rollout.records import Group
from megatron_idempotent.trainer.task.prompts import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The result of one rollout's training, over all ranks.

    `loss`, `kl` and `clip_fraction` are means over response tokens on all ranks; `grad_norm` is
    the mean over optimizer steps of the norm before clipping, and `learning_rate` that of the last
    one. Example: `metrics.loss`.
    """

    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float
    learning_rate: float
    response_tokens: int
    optimizer_steps: int


class Sampler(Protocol):
    """Makes responses."""

    def sample(self, prompts: Sequence[Prompt], *, samples: int, stream: int) -> tuple[Group, ...]:
        """One group per prompt, in their order, with `samples` responses each.

        `stream` names the random numbers: the same stream, prompt and weights give the same text.
        """
        ...


class Policy(Protocol):
    """Learns from a batch."""

    def weights(self) -> AbstractContextManager[torch.nn.Module]:
        """Collective: the decoder for one block, with all of its parameters up to date.

        It is in eval mode and records no gradient there, and is back in its own mode afterwards.
        """
        ...

    def train(self, batch: Batch, *, index: int) -> StepMetrics:
        """Collective: the optimizer steps of rollout `index`."""
        ...
