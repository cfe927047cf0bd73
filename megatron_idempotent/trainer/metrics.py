"""Formulas of what is measured per rollout.

`train/` and `evaluation/` hold what a repeated run reproduces bit for bit; everything that depends
on the clock is under `timing/train/`, and what a device's memory held under `memory/train/`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_idempotent.trainer import ranks
from megatron_idempotent.trainer.memory import MemoryLedger
from megatron_idempotent.trainer.names import (
    GRAD_NORM,
    HELD_OUT,
    LOSS,
    REWARD,
    TOKENS_PER_S,
    TOTAL_S,
)
from megatron_idempotent.trainer.parts import StepMetrics
from megatron_idempotent.trainer.rollout.records import ScoredGroup


class Stopwatch:
    """Seconds and memory per phase of one rollout, on this rank.

    Example: `with watch.phase("generation"):`
    """

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._ledger = ledger or MemoryLedger()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block; a phase that raises is not recorded."""
        started = time.perf_counter()
        with self._ledger.phase(name):
            yield
        self._phases[name] = time.perf_counter() - started

    def memory(self) -> dict[str, float]:
        """GiB of device memory per phase; nothing on a CPU."""
        return self._ledger.metrics()

    def timings(self, tokens: int) -> dict[str, float]:
        """Seconds per phase and in all, and response tokens of all ranks per second."""
        total = time.perf_counter() - self._started
        named = {f"timing/train/{name}_s": seconds for name, seconds in self._phases.items()}
        return {**named, TOTAL_S: total, TOKENS_PER_S: tokens / total}


def rollout_metrics(scored: Sequence[ScoredGroup], step: StepMetrics) -> dict[str, float]:
    """Means over all samples, or groups, of all ranks. Collective."""
    rewards = [reward for group in scored for reward in group.rewards]
    reward, solved, samples, tied, groups = ranks.sums(
        [
            sum(rewards),
            sum(reward == 1.0 for reward in rewards),
            len(rewards),
            sum(len(set(group.rewards)) == 1 for group in scored),
            len(scored),
        ]
    )
    return {
        REWARD: reward / samples,
        "train/solved_fraction": solved / samples,
        # Groups without a spread of rewards have no advantages, and teach nothing.
        "train/tied_group_fraction": tied / groups,
        "train/response_length": step.response_tokens / samples,
        "train/response_tokens": float(step.response_tokens),
        LOSS: step.loss,
        "train/kl": step.kl,
        "train/clip_fraction": step.clip_fraction,
        GRAD_NORM: step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/optimizer_steps": float(step.optimizer_steps),
    }


def evaluation_metrics(scored: Sequence[ScoredGroup], *, seconds: float) -> dict[str, float]:
    """Mean reward and share of wholly right answers over held-out prompts. Collective."""
    rewards = [reward for group in scored for reward in group.rewards]
    reward, solved, samples = ranks.sums(
        [sum(rewards), sum(reward == 1.0 for reward in rewards), len(rewards)]
    )
    return {
        HELD_OUT: reward / samples,
        "evaluation/solved_fraction": solved / samples,
        "timing/train/evaluation_s": seconds,
    }
