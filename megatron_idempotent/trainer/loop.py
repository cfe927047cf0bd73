"""Group-relative policy optimisation, top to bottom as in the paper, and a rank that runs it.

This runs on every rank. Each rank takes its share of the prompts, in whole groups; the policy's
`train` and the sums of `ranks` are where the ranks meet.

A CPU rank has no device memory to measure: its resident set holds pages that it shares with its
launcher, and does not shrink when a tensor is freed, so no number of it would say what a phase
took.

`train/` and `evaluation/` hold what a repeated run reproduces bit for bit; everything that depends
on the clock is under `timing/train/`, and what a device's memory held under `memory/train/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import barrier, get_rank

from megatron_idempotent import cpu
from megatron_idempotent.metrics.loggers import Logger, Loggers
from megatron_idempotent.metrics.names import (
    GRAD_NORM,
    HELD_OUT,
    LOSS,
    REWARD,
    TOKENS_PER_S,
    TOTAL_S,
)
from megatron_idempotent.trainer.task.prompts import Prompt, PromptSet, rollout_prompts
from megatron_idempotent.trainer.task.reward import Reward, load_reward

from .batch import PromptGroup, ResponseSampler, ScoredGroup, StepMetrics, TrainedPolicy, pack
from .checkpoint import PolicyCheckpoints
from .config import Config
from .engines import EngineSampler, make_engines
from .output import TRAINED, Job
from .policy import start_policy
from .report import make_loggers, make_progress
from .rewards import group_advantages

Item = TypeVar("Item")


def share(items: Sequence[Item]) -> tuple[Item, ...]:
    """This rank's items: every world-size-th, starting at its rank."""
    return tuple(items[dist.get_rank() :: dist.get_world_size()])


def sums(values: Sequence[float]) -> list[float]:
    """Each value summed over all ranks, in float64. Collective: all ranks give as many values."""
    total = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total)
    result: list[float] = total.tolist()
    return result


_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Bytes that the allocator has given out, has taken from the device, and gave out at most.

    Example: `MemoryReading(allocated=0, reserved=2 << 20, peak=1 << 20)`.
    """

    allocated: int
    reserved: int
    peak: int


def read_device() -> MemoryReading:
    """Memory of the current CUDA device, the peak since `reset_peak`. Waits for nothing."""
    return MemoryReading(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak=torch.cuda.max_memory_allocated(),
    )


def reader() -> Callable[[], MemoryReading] | None:
    """Returns a function that reads this process's device memory; None without a device."""
    emulated = cpu.is_enabled()
    return None if emulated or not torch.cuda.is_available() else read_device


class MemoryLedger:
    """Memory before, at most during, and after each phase of one rollout.

    Example:
        ledger = MemoryLedger()
        with ledger.phase("generation"):
            ...
        kept_gib = ledger.metrics().get("memory/train/generation_kept_gib")
    """

    def __init__(
        self,
        read: Callable[[], MemoryReading] | None = None,
        reset_peak: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            read: the memory now; None for this process's device.
            reset_peak: starts the next peak at what is allocated now.
        """
        self._read = read or reader()
        self._reset_peak = reset_peak or torch.cuda.reset_peak_memory_stats
        self._phases: dict[str, tuple[MemoryReading, MemoryReading]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a block; a phase that raises is not entered."""
        if self._read is None:
            yield
            return
        self._reset_peak()
        before = self._read()
        yield
        self._phases[name] = before, self._read()

    def metrics(self) -> dict[str, float]:
        """Per phase: GiB allocated and reserved at its end, allocated at most, and kept.

        Kept is what is allocated after a phase less what was before it: 0 where it gives back what
        it took.
        """
        found: dict[str, float] = {}
        for name, (before, after) in self._phases.items():
            found[f"memory/train/{name}_allocated_gib"] = after.allocated / _GIB
            found[f"memory/train/{name}_reserved_gib"] = after.reserved / _GIB
            found[f"memory/train/{name}_peak_gib"] = after.peak / _GIB
            found[f"memory/train/{name}_kept_gib"] = (after.allocated - before.allocated) / _GIB
        return found


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
    reward, solved, samples, tied, groups = sums(
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
    reward, solved, samples = sums(
        [sum(rewards), sum(reward == 1.0 for reward in rewards), len(rewards)]
    )
    return {
        HELD_OUT: reward / samples,
        "evaluation/solved_fraction": solved / samples,
        "timing/train/evaluation_s": seconds,
    }


# Evaluation draws from streams that no rollout uses: a rollout's stream is its index.
_EVALUATION_STREAM = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """The parts of the loop. `positions` is the length of the training sequences in tokens.

    `publish` and `save` are called with the number of rollouts that are done, and are collective:
    the one brings the weights to what samples, the other writes a checkpoint.
    Example: `train(config, prompts, parts, first_rollout=0)`.
    """

    sampler: ResponseSampler
    publish: Callable[[int], None]
    reward: Reward
    policy: TrainedPolicy
    logger: Logger
    save: Callable[[int], None]
    positions: int
    pad_id: int


def train(config: Config, prompts: PromptSet, parts: TrainerParts, *, first_rollout: int) -> None:
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
                share(asked), samples=config.rollout.group_size, stream=index
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
    groups: Sequence[PromptGroup], reward: Reward, *, normalize_std: bool
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


def evaluate(
    config: Config, prompts: PromptSet, parts: TrainerParts, *, done: int
) -> Mapping[str, float]:
    """Mean reward on held-out prompts, one sample each, at the training temperature. Collective."""
    held_out: tuple[Prompt, ...] = prompts.held_out[: config.evaluation.prompts]
    started = time.perf_counter()
    groups = parts.sampler.sample(share(held_out), samples=1, stream=_EVALUATION_STREAM + done)
    scored = score(groups, parts.reward, normalize_std=False)
    return evaluation_metrics(scored, seconds=time.perf_counter() - started)


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def work(job: Job) -> None:
    """Train as one of the ranks of the default process group; all of them run this."""
    rank = get_rank()
    config = job.config
    with _output_to(job.out / "logs" / f"rank-{rank}.log") as terminal, ExitStack() as stack:
        started = start_policy(job)
        policy, tokenizer = started.policy, started.tokenizer
        checkpoints = PolicyCheckpoints(job.out / "checkpoints", config, policy)
        first_rollout = checkpoints.load(job.resume_from) if job.resume_from else 0
        logger = stack.enter_context(
            contextlib.closing(_loggers(job, rank, first_rollout, terminal))
        )
        engines = stack.enter_context(
            contextlib.closing(make_engines(config, policy, started.checkpoint, job.out))
        )

        def publish(done: int) -> None:
            with policy.weights():
                engines.publish(done)

        parts = TrainerParts(
            sampler=EngineSampler(
                engines.generate,
                tokenizer,
                temperature=config.rollout.temperature,
                max_response_tokens=config.rollout.max_response_tokens,
                seed=config.run.seed,
            ),
            publish=publish,
            reward=load_reward(config.task.reward),
            policy=policy,
            logger=logger,
            save=checkpoints.save,
            positions=started.positions,
            pad_id=tokenizer.pad_id,
        )
        train(config, started.prompts, parts, first_rollout=first_rollout)
        policy.save_hf(job.out / TRAINED)
        # Rank 0 may not leave first: it hosts the store that the others still talk to.
        barrier()


def _loggers(job: Job, rank: int, first_rollout: int, terminal: IO[str]) -> Loggers:
    # Built where they run: they hold locks and threads. The other ranks log nothing.
    if rank != 0:
        return Loggers([])
    shown = []
    if not job.quiet:
        shown = [make_progress(job.config, first_rollout=first_rollout, terminal=terminal)]
    # No event loop waits here, and a thread that draws the bar would take a core from the ranks.
    return make_loggers(job, *shown, threaded=False)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[IO[str]]:
    """Send what this process prints to a file; yields the terminal it would have printed to.

    By descriptor, because Megatron's libraries print from C++ too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("ab", buffering=0) as log, os.fdopen(os.dup(2), "w") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
