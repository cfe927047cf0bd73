"""Runs group-relative policy optimisation on every rank, in the order of the paper.

Each rank samples and scores its share of the prompts, in whole groups; the ranks of a replica then
train on the groups of all of them. All ranks meet in the policy's `train` and in the metrics. The
asynchronous run (`async_run`) uses the same requests, scorer, recipe and policy.

Metrics under `train/` and `evaluation/` are the same, bit for bit, when a run is repeated. Those
under `timing/train/` and seconds under `sync/` depend on the clock, and those under `memory/train/`
on the device.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch.distributed import all_reduce, barrier, get_rank

from megatron_idempotent.proof import cpu
from megatron_idempotent.rl.controller import RolloutGroup
from megatron_idempotent.rl.engines import Sample
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.metrics.names import RESPONSE_TOKENS, SYNC, TOKENS_PER_S, TOTAL_S
from megatron_idempotent.rl.trainer.task.prompts import Prompt, PromptSet, PromptStream
from megatron_idempotent.rl.trainer.task.reward import load_reward
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

from .checkpoint import load_weights, save_checkpoint
from .engines import Engines, make_engines
from .output import TRAINED, Job, output_to
from .policy import MegatronPolicy, start_policy
from .report import RolloutProgress, make_loggers
from .rewards import (
    EVALUATION_STREAM,
    GrpoRecipe,
    Scorer,
    due,
    evaluation_means,
    group_means,
    group_sums,
    make_requests,
)

_GIB = 1 << 30


def work(job: Job) -> None:
    """Train as one rank until the job is done. Collective over the default process group."""
    rank, steps = get_rank(), job.config.optimizer.steps_per_rollout
    with output_to(job.out / "logs" / f"rank-{rank}.log") as terminal, ExitStack() as stack:
        if rank == 0:
            job.say("building the model", terminal)
        policy, prompts, tokenizer = start_policy(job)
        first = 0
        if job.resume_from:
            first = load_weights(policy.stock, job.resume_from / "megatron") // steps
        shown = []
        if rank == 0 and not job.quiet:
            job.say("evaluating, and then the first rollout", terminal)
            shown = [RolloutProgress(job.config, first_rollout=first, terminal=terminal)]
        # The other ranks log nothing. No event loop waits here, and a thread that draws the bar
        # would take a core from the ranks.
        loggers = make_loggers(job, *shown, threaded=False) if rank == 0 else Loggers([])
        stack.callback(loggers.close)
        engines = make_engines(job.config, policy, policy.checkpoint, job.out)
        stack.enter_context(contextlib.closing(engines))
        Loop(job, policy, prompts, tokenizer, engines, loggers).run(first)
        policy.save_hf(job.out / TRAINED)
        # Rank 0 may not leave first: it hosts the store that the others still talk to.
        barrier()


class Loop:
    """Holds the algorithm, on one rank.

    Example: `Loop(job, policy, prompts, tokenizer, engines, loggers).run(0)`.
    """

    def __init__(
        self,
        job: Job,
        policy: MegatronPolicy,
        prompts: PromptSet,
        tokenizer: TextTokenizer,
        engines: Engines,
        loggers: Loggers,
    ) -> None:
        self._job, self._config = job, job.config
        self._prompts, self._tokenizer = prompts, tokenizer
        self._policy, self._engines, self._loggers = policy, engines, loggers
        self._scorer = Scorer(load_reward(job.config.task.reward), tokenizer)
        self._recipe = GrpoRecipe(job.config, tokenizer, positions=policy.positions)

    def run(self, first_rollout: int) -> None:
        """Run all rollouts from an index on: sample, score, train, publish. Collective.

        If it is 0, the initial weights are evaluated first.
        """
        config, policy = self._config, self._policy
        last, every = config.run.rollouts, config.run.checkpoint_every
        count, samples = config.rollout.prompts, config.rollout.group_size
        stream = PromptStream(self._prompts.train, seed=config.run.seed)
        self._publish(first_rollout)
        if first_rollout == 0:
            self._loggers.log(self._evaluate(0), step=0)
        watch = Stopwatch()
        for index in range(first_rollout, last):
            asked = [stream.prompt(index * count + place) for place in range(count)]
            with watch.phase("generation"):
                drawn = self._draw(policy.replica.share(asked), samples=samples, stream=index)
            with watch.phase("advantages"):
                groups = self._score(drawn)
                batch = self._recipe.inputs(policy.replica.gather(groups))
            with watch.phase("policy_training"):
                step = policy.train(batch, index=index)

            done = index + 1
            with watch.phase("sync_weights"):
                published = self._publish(done)
            # Means over the samples or groups of all ranks.
            total = summed(group_sums(groups))
            metrics = {f"train/{name}": value for name, value in group_means(total).items()} | step
            metrics["train/response_length"] = step[RESPONSE_TOKENS] / total["samples"]
            metrics |= {f"{SYNC}{name}": value for name, value in published.items()}
            if due(done, config.evaluation.every, last):
                with watch.phase("evaluation"):
                    metrics |= self._evaluate(done)
            # Before the checkpoint, which a run may be continued from at once: no row is lost.
            self._loggers.log(metrics | watch.metrics(step[RESPONSE_TOKENS]), step=done)
            watch = Stopwatch()
            if every and due(done, every, last):
                with watch.phase("checkpoint"):
                    save_checkpoint(self._job, policy, done)

    def _publish(self, done: int) -> Mapping[str, float]:
        """Bring the weights after a number of rollouts to the engines. Collective."""
        with self._policy.weights():
            return self._engines.publish(done)

    def _evaluate(self, done: int) -> Mapping[str, float]:
        """Measure the mean reward on held-out prompts after `done` rollouts. Collective.

        Each prompt has one sample, at the training temperature.
        """
        held_out = self._prompts.held_out[: self._config.evaluation.prompts]
        started = time.perf_counter()
        mine = self._policy.replica.share(held_out)
        groups = self._score(self._draw(mine, samples=1, stream=EVALUATION_STREAM + done))
        seconds = time.perf_counter() - started
        means = evaluation_means(summed(group_sums(groups)))
        return {**means, "timing/train/evaluation_s": seconds}

    def _draw(
        self, prompts: Sequence[Prompt], *, samples: int, stream: int
    ) -> list[tuple[Prompt, tuple[Sample, ...]]]:
        """Draw responses to each of this rank's prompts; collective if engines are shared.

        A sample depends on the seed, `stream`, the prompt's row, its own index and the weights. It
        does not depend on the number of ranks nor, up to the rounding of logits, on other samples.
        """
        requests = [
            request
            for prompt in prompts
            for request in make_requests(
                self._config, self._tokenizer, prompt, stream=stream, samples=samples
            )
        ]
        found = iter(self._engines.generate(requests))
        return [(prompt, tuple(itertools.islice(found, samples))) for prompt in prompts]

    def _score(self, drawn: Sequence[tuple[Prompt, tuple[Sample, ...]]]) -> list[RolloutGroup]:
        """Have the verifier score this rank's samples; each prompt's are a group."""
        return [
            RolloutGroup(
                id=prompt.row,
                prompt=prompt,
                samples=samples,
                rewards=self._scorer.rewards(prompt, samples),
            )
            for prompt, samples in drawn
        ]


def summed(values: Mapping[str, float]) -> dict[str, float]:
    """Return each value summed over all ranks, in float64.

    Collective: all ranks give the same names, in the same order.
    """
    total = torch.tensor(
        list(values.values()), dtype=torch.float64, device=torch.cuda.current_device()
    )
    all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def device_memory() -> tuple[int, int, int]:
    """Return bytes that tensors have, that torch holds, and the most that tensors had at once.

    They are those of this process's device; torch does not wait for its work.
    """
    return (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
    )


class Stopwatch:
    """Measures seconds and device memory of each phase of one rollout, on this rank.

    On a CPU no memory is measured: a rank's resident set has pages that it shares with its
    launcher, and does not shrink when a tensor is freed, so that it would not show what a phase
    took. Example: `with watch.phase("generation"): …`
    """

    def __init__(
        self,
        memory: Callable[[], tuple[int, int, int]] | None = None,
        reset_peak: Callable[[], None] | None = None,
    ) -> None:
        """Take `device_memory`, and what makes its peak begin again; None for this device's."""
        self._started = time.perf_counter()
        self._found: dict[str, float] = {}
        if memory is None and torch.cuda.is_available() and not cpu.is_enabled():
            memory = device_memory
        self._memory = memory
        self._reset_peak = reset_peak or torch.cuda.reset_peak_memory_stats

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the seconds and the memory of a block; leave out a block that raises.

        GiB are those allocated and reserved at its end, the peak, and those kept: what is allocated
        after it minus what was before. They are 0 for a phase that frees what it allocates.
        """
        started, before = time.perf_counter(), 0
        if self._memory is not None:
            self._reset_peak()
            before = self._memory()[0]
        yield
        self._found[f"timing/train/{name}_s"] = time.perf_counter() - started
        if self._memory is not None:
            allocated, reserved, peak = self._memory()
            held = {"allocated": allocated, "reserved": reserved, "peak": peak}
            for number, size in (held | {"kept": allocated - before}).items():
                self._found[f"memory/train/{name}_{number}_gib"] = size / _GIB

    def metrics(self, tokens: float) -> dict[str, float]:
        """Return what was measured, seconds in all, and all ranks' `tokens` per second."""
        total = time.perf_counter() - self._started
        return {**self._found, TOTAL_S: total, TOKENS_PER_S: tokens / total}
