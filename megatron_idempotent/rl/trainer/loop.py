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
    """Train as one rank until the job is complete. A collective of the default process group."""
    rank, steps = get_rank(), job.config.optimizer.steps_per_rollout
    with output_to(job.out / "logs" / f"rank-{rank}.log") as terminal, ExitStack() as stack:
        if rank == 0:
            job.say("building the model", terminal)
        policy, prompts, tokenizer = start_policy(job)
        first = 0
        if job.resume_from:
            first = load_weights(policy.stock, job.resume_from / "megatron") // steps
        loggers_on_terminal = []
        if rank == 0 and not job.quiet:
            job.say("evaluating, and then the first rollout", terminal)
            loggers_on_terminal = [RolloutProgress(job.config, terminal=terminal)]
        # Only rank 0 logs. Without a thread, because there is no event loop to block, and a thread
        # would take a core from the ranks.
        loggers = (
            make_loggers(job, *loggers_on_terminal, threaded=False) if rank == 0 else Loggers([])
        )
        stack.callback(loggers.close)
        engines = make_engines(job.config, policy, policy.checkpoint, job.out)
        stack.enter_context(contextlib.closing(engines))
        Loop(job, policy, prompts, tokenizer, engines, loggers).run(first)
        policy.save_hf(job.out / TRAINED)
        # Rank 0 must not end first: it hosts the store that the other ranks still use.
        barrier()


class Loop:
    """The training loop of one rank.

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
        """Run all rollouts from an index on: sample, score, train, publish. A collective.

        From index 0, the initial weights are evaluated first.
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
            prompts = [stream.prompt(index * count + position) for position in range(count)]
            with watch.phase("generation"):
                drawn = self._draw(policy.replica.share(prompts), samples=samples, stream=index)
            with watch.phase("advantages"):
                groups = self._score(drawn)
                batch = self._recipe.inputs(policy.replica.gather(groups))
            with watch.phase("policy_training"):
                step = policy.train(batch, index=index)

            completed = index + 1
            with watch.phase("sync_weights"):
                published = self._publish(completed)
            # Means over the samples or groups of all ranks.
            total = summed(group_sums(groups))
            metrics = {f"train/{name}": value for name, value in group_means(total).items()} | step
            metrics["train/response_length"] = step[RESPONSE_TOKENS] / total["samples"]
            metrics |= {f"{SYNC}{name}": value for name, value in published.items()}
            if due(completed, config.evaluation.every, last):
                with watch.phase("evaluation"):
                    metrics |= self._evaluate(completed)
            # Before the checkpoint, so that a run that resumes from it has this row.
            self._loggers.log(metrics | watch.metrics(step[RESPONSE_TOKENS]), step=completed)
            watch = Stopwatch()
            if every and due(completed, every, last):
                with watch.phase("checkpoint"):
                    save_checkpoint(self._job, policy, completed)

    def _publish(self, completed: int) -> Mapping[str, float]:
        """Send the weights after some completed rollouts to the engines. A collective."""
        with self._policy.weights():
            return self._engines.publish(completed)

    def _evaluate(self, completed: int) -> Mapping[str, float]:
        """Measure the mean reward on held-out prompts after some rollouts. A collective.

        Each prompt has one sample, at the training temperature.
        """
        held_out = self._prompts.held_out[: self._config.evaluation.prompts]
        started = time.perf_counter()
        own_prompts = self._policy.replica.share(held_out)
        groups = self._score(
            self._draw(own_prompts, samples=1, stream=EVALUATION_STREAM + completed)
        )
        seconds = time.perf_counter() - started
        means = evaluation_means(summed(group_sums(groups)))
        return {**means, "timing/train/evaluation_s": seconds}

    def _draw(
        self, prompts: Sequence[Prompt], *, samples: int, stream: int
    ) -> list[tuple[Prompt, tuple[Sample, ...]]]:
        """Sample responses to this rank's prompts; a collective if engines are shared.

        A sample depends on the seed, `stream`, the prompt's row, its own index and the weights. It
        does not depend on the number of ranks or, up to the rounding of logits, on other samples.
        """
        requests = [
            request
            for prompt in prompts
            for request in make_requests(
                self._config, self._tokenizer, prompt, stream=stream, samples=samples
            )
        ]
        samples_in_order = iter(self._engines.generate(requests))
        return [(prompt, tuple(itertools.islice(samples_in_order, samples))) for prompt in prompts]

    def _score(self, drawn: Sequence[tuple[Prompt, tuple[Sample, ...]]]) -> list[RolloutGroup]:
        """Score this rank's samples with the verifier; the samples of a prompt form a group."""
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

    A collective: all ranks pass the same names in the same order.
    """
    total = torch.tensor(
        list(values.values()), dtype=torch.float64, device=torch.cuda.current_device()
    )
    all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def device_memory() -> tuple[int, int, int]:
    """Return the allocated, reserved and peak allocated bytes of this process's device.

    This does not synchronize with the device.
    """
    return (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
    )


class Stopwatch:
    """Measures the seconds and device memory of each phase of one rollout, on this rank.

    On a CPU no memory is measured: a rank's resident set includes pages shared with its launcher
    and does not shrink when a tensor is freed, so it does not show a phase's use.

    Example: `with watch.phase("generation"): …`
    """

    def __init__(
        self,
        memory: Callable[[], tuple[int, int, int]] | None = None,
        reset_peak: Callable[[], None] | None = None,
    ) -> None:
        """Take functions that read device memory and reset its peak; None for this device's."""
        self._started = time.perf_counter()
        self._found: dict[str, float] = {}
        if memory is None and torch.cuda.is_available() and not cpu.is_enabled():
            memory = device_memory
        self._memory = memory
        self._reset_peak = reset_peak or torch.cuda.reset_peak_memory_stats

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the seconds and the memory of a block, unless it raises.

        Memory is in GiB: allocated and reserved at the block's end, the peak, and `kept`, the
        increase of allocated memory, which is 0 for a phase that frees what it allocates.
        """
        started, allocated_before = time.perf_counter(), 0
        if self._memory is not None:
            self._reset_peak()
            allocated_before = self._memory()[0]
        yield
        self._found[f"timing/train/{name}_s"] = time.perf_counter() - started
        if self._memory is not None:
            allocated, reserved, peak = self._memory()
            sizes = {"allocated": allocated, "reserved": reserved, "peak": peak}
            for number, size in (sizes | {"kept": allocated - allocated_before}).items():
                self._found[f"memory/train/{name}_{number}_gib"] = size / _GIB

    def metrics(self, tokens: float) -> dict[str, float]:
        """Return all measurements, the total seconds, and `tokens` per second."""
        total = time.perf_counter() - self._started
        return {**self._found, TOTAL_S: total, TOKENS_PER_S: tokens / total}
