"""Runs group-relative policy optimisation on every rank, in the order of the paper.

Each rank samples and scores its prompts, in complete groups; the ranks of a replica then train on
all of the replica's groups. The policy's `train` and the metrics are collectives of all ranks. The
asynchronous run (`async_run`) uses the same requests, scorer, recipe and policy.

Metrics under `train/` and `evaluation/` are equal bit for bit when a run is repeated. Metrics under
`timing/train/` and seconds under `sync/` depend on the clock, and those under `memory/train/` on
the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed import all_reduce, barrier, get_rank

from megatron_idempotent.proof import cpu
from megatron_idempotent.rl.engines import Sample
from megatron_idempotent.rl.metrics.console import RolloutProgress
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.metrics.names import RESPONSE_TOKENS, SYNC, TOKENS_PER_S, TOTAL_S
from megatron_idempotent.rl.trainer.task.prompts import Prompt, PromptSet, PromptStream
from megatron_idempotent.rl.trainer.task.reward import load_reward
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

from . import rewards
from .checkpoint import load_weights, save_checkpoint
from .engines import Engines, make_engines
from .output import TRAINED, Job, output_to
from .policy import MegatronPolicy, start_policy
from .report import make_loggers
from .rewards import GrpoRecipe, Scorer

_GIB = 1 << 30


def work(job: Job) -> None:
    """Train as one rank until the job is complete. A collective of the default process group."""
    rank, steps = get_rank(), job.config.optimizer.steps_per_rollout
    with output_to(job.out / "logs" / f"rank-{rank}.log") as terminal, ExitStack() as stack:
        if rank == 0:
            job.say("building the model", terminal)
        policy, prompts, tokenizer = start_policy(job)
        first = 0
        if job.resume_from:
            first = load_weights(policy.stock, job.resume_from / "megatron") // steps
        loggers = Loggers([])  # rank 0 alone logs
        if rank == 0:
            job.say("evaluating, and then the first rollout", terminal)
            rollouts = job.config.run.rollouts
            display = None if job.quiet else RolloutProgress(terminal, rollouts=rollouts)
            # Without a thread, because there is no event loop to block, and a thread would take a
            # core from the ranks.
            loggers = make_loggers(job, display, threaded=False)
        stack.callback(loggers.close)
        engines = make_engines(job, policy)
        stack.enter_context(contextlib.closing(engines))
        Loop(job, policy, prompts, tokenizer, engines, loggers).run(first)
        policy.save_hf(job.out / TRAINED)
        # Rank 0 must not end first: it hosts the store that the other ranks still use.
        barrier()


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """The synchronous training loop of one rank: sample, score, train, send weights to the engines.

    Example: `Loop(job, policy, prompts, tokenizer, engines, loggers).run(0)`.
    """

    job: Job
    policy: MegatronPolicy
    prompts: PromptSet
    tokenizer: TextTokenizer
    engines: Engines
    loggers: Loggers

    def run(self, first_rollout: int) -> None:
        """Run all rollouts from the index `first_rollout` on: sample, score, train, publish. A
        collective.

        From index 0, the initial weights are evaluated first.
        """
        config, policy, tokenizer = self.job.config, self.policy, self.tokenizer
        scorer = Scorer(load_reward(config.task.reward), tokenizer)
        recipe = GrpoRecipe(config, tokenizer, positions=policy.positions)
        last, every = config.run.rollouts, config.run.checkpoint_every
        count, samples = config.rollout.prompts, config.rollout.group_size
        stream = PromptStream(self.prompts.train, seed=config.run.seed)
        self._publish(first_rollout)
        if first_rollout == 0:
            self.loggers.log(self._evaluate(scorer, 0), step=0)
        watch = Stopwatch()
        for index in range(first_rollout, last):
            prompts = [stream.prompt(index * count + position) for position in range(count)]
            with watch.phase("generation"):
                drawn = self._draw(policy.replica.share(prompts), samples=samples, stream=index)
            with watch.phase("advantages"):
                groups = [scorer.group(*of_prompt) for of_prompt in drawn]
                batch = recipe.inputs(policy.replica.gather(groups))
            with watch.phase("policy_training"):
                step = policy.train(batch, index=index)

            completed = index + 1
            with watch.phase("sync_weights"):
                published = self._publish(completed)
            # Means over the samples or groups of all ranks.
            total = summed(rewards.group_sums(groups))
            metrics = {
                f"train/{name}": value for name, value in rewards.group_means(total).items()
            } | step
            metrics["train/response_length"] = step[RESPONSE_TOKENS] / total["samples"]
            metrics |= {f"{SYNC}{name}": value for name, value in published.items()}
            if rewards.due(completed, config.evaluation.every, last):
                with watch.phase("evaluation"):
                    metrics |= self._evaluate(scorer, completed)
            # Before the checkpoint, so that a run that resumes from it has this row.
            self.loggers.log(metrics | watch.metrics(step[RESPONSE_TOKENS]), step=completed)
            watch = Stopwatch()
            if every and rewards.due(completed, every, last):
                with watch.phase("checkpoint"):
                    save_checkpoint(self.job, policy, completed)

    def _publish(self, completed: int) -> Mapping[str, float]:
        """Send the current weights to the engines, as the version `completed`, the number of
        completed rollouts. A collective.
        """
        with self.policy.weights():
            return self.engines.publish(completed)

    def _evaluate(self, scorer: Scorer, completed: int) -> Mapping[str, float]:
        """Measure the mean reward on held-out prompts, after `completed` rollouts. Return the mean
        reward, the fraction of solved samples and the seconds, as metrics. A collective.

        Each prompt has one sample, at the training temperature.
        """
        held_out = self.prompts.held_out[: self.job.config.evaluation.prompts]
        started = time.perf_counter()
        own_prompts = self.policy.replica.share(held_out)
        drawn = self._draw(own_prompts, samples=1, stream=rewards.EVALUATION_STREAM + completed)
        groups = [scorer.group(*of_prompt) for of_prompt in drawn]
        seconds = time.perf_counter() - started
        means = rewards.evaluation_means(summed(rewards.group_sums(groups)))
        return {**means, "timing/train/evaluation_s": seconds}

    def _draw(
        self, prompts: Sequence[Prompt], *, samples: int, stream: int
    ) -> list[tuple[Prompt, tuple[Sample, ...]]]:
        """Sample `samples` responses to each of this rank's prompts; return a (prompt, responses)
        pair for each prompt. A collective if rank 0 samples for all ranks.

        A sample depends on the seed, `stream`, the prompt's row, its own index and the weights. It
        does not depend on the number of ranks or, up to the rounding of logits, on other samples.
        """
        config, tokenizer = self.job.config, self.tokenizer
        requests = [
            request
            for prompt in prompts
            for request in rewards.make_requests(
                config, tokenizer, prompt, stream=stream, samples=samples
            )
        ]
        samples_in_order = iter(self.engines.generate(requests))
        return [(prompt, tuple(itertools.islice(samples_in_order, samples))) for prompt in prompts]


def summed(values: Mapping[str, float]) -> dict[str, float]:
    """Return each value summed over all ranks, in float64.

    A collective: all ranks pass the same names in the same order.
    """
    total = torch.tensor(
        list(values.values()), dtype=torch.float64, device=torch.cuda.current_device()
    )
    all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


class Stopwatch:
    """Measures the seconds and device memory of each phase of one rollout, on this rank.

    On a CPU no memory is measured: a rank's resident set includes pages shared with its launcher
    and does not shrink when a tensor is freed, so it does not show a phase's use.

    Example: `with watch.phase("generation"): …`
    """

    def __init__(self, device: Any = None) -> None:
        """Take `device`, an object with the memory functions of `torch.cuda`.

        None uses `torch.cuda` if the rank has a GPU, and measures no memory without one.
        """
        self._started, self._metrics = time.perf_counter(), dict[str, float]()
        on_gpu = torch.cuda.is_available() and not cpu.is_enabled()
        self._device = torch.cuda if device is None and on_gpu else device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the seconds and the device memory of a `with` block as the phase `name`, unless
        the block raises.

        Memory is in GiB: allocated and reserved at the block's end, the peak, and `kept`, the
        increase of allocated memory, which is 0 for a phase that frees what it allocates. This does
        not synchronize with the device.
        """
        started, device, allocated_before = time.perf_counter(), self._device, 0
        if device is not None:
            device.reset_peak_memory_stats()
            allocated_before = device.memory_allocated()
        yield
        self._metrics[f"timing/train/{name}_s"] = time.perf_counter() - started
        if device is not None:
            allocated = device.memory_allocated()
            sizes = {"allocated": allocated, "kept": allocated - allocated_before}
            sizes |= {"reserved": device.memory_reserved(), "peak": device.max_memory_allocated()}
            for kind, size in sizes.items():
                self._metrics[f"memory/train/{name}_{kind}_gib"] = size / _GIB

    def metrics(self, tokens: float) -> dict[str, float]:
        """Return all measurements by metric name, with the total seconds, and `tokens` ÷ the total
        seconds.
        """
        total = time.perf_counter() - self._started
        return {**self._metrics, TOTAL_S: total, TOKENS_PER_S: tokens / total}
