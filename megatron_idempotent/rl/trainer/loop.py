"""Runs group-relative policy optimisation on every rank, in the order of the paper.

Each rank samples and scores its share of the prompts, in whole groups; the ranks of a replica then
train on the groups of all of them. All ranks meet in the policy's `train` and in the metrics. The
asynchronous run (`async_run`) uses the same requests, scorer, recipe and policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO

from torch.distributed import barrier, get_rank

from megatron_idempotent.rl.controller import RolloutGroup
from megatron_idempotent.rl.engines import Request, Sample
from megatron_idempotent.rl.metrics.loggers import Logger, Loggers
from megatron_idempotent.rl.trainer.task.prompts import Prompt, PromptSet, rollout_prompts
from megatron_idempotent.rl.trainer.task.reward import load_reward

from .checkpoint import PolicyCheckpoints
from .config import Config
from .engines import make_engines
from .measure import Stopwatch, evaluation_metrics, rollout_metrics
from .output import TRAINED, Job, output_to
from .policy import MegatronPolicy, start_policy
from .report import make_loggers, make_progress
from .rewards import EVALUATION_STREAM, GrpoRecipe, RequestMaker, Scorer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """Holds the parts of the loop. Example: `train(config, prompts, parts, first_rollout=0)`."""

    requests: RequestMaker
    """Makes the requests of a prompt."""
    generate: Callable[[Sequence[Request]], Sequence[Sample]]
    """Draws a sample for each of this rank's requests. Collective if engines are shared."""
    scorer: Scorer
    """Gives each sample its reward."""
    recipe: GrpoRecipe
    """Turns groups into a batch."""
    policy: MegatronPolicy
    """The model that is trained, and its optimizer."""
    publish: Callable[[int], None]
    """Brings the weights after a number of rollouts to the engines. Collective."""
    save: Callable[[int], None]
    """Writes the checkpoint after a number of rollouts. Collective."""
    logger: Logger
    """Records the metrics of each rollout."""


def train(config: Config, prompts: PromptSet, parts: TrainerParts, *, first_rollout: int) -> None:
    """Run all rollouts from index `first_rollout` on: sample, score, train, publish. Collective.

    If it is 0, the initial weights are evaluated first.
    """
    count, last = config.rollout.prompts, config.run.rollouts
    replica = parts.policy.replica
    parts.publish(first_rollout)
    if first_rollout == 0:
        parts.logger.log(evaluate(config, prompts, parts, done=0), step=0)
    for index in range(first_rollout, config.run.rollouts):
        watch = Stopwatch()
        asked = rollout_prompts(prompts.train, index=index, count=count, seed=config.run.seed)
        with watch.phase("generation"):
            mine = replica.share(asked)
            drawn = draw(parts, mine, samples=config.rollout.group_size, stream=index)
        with watch.phase("advantages"):
            groups = score(parts.scorer, drawn)
            batch = parts.recipe.inputs(replica.gather(groups))
        with watch.phase("policy_training"):
            step = parts.policy.train(batch, index=index)

        done = index + 1
        with watch.phase("sync_weights"):
            parts.publish(done)
        metrics = rollout_metrics(groups, step)
        if _due(done, config.evaluation.every, last):
            with watch.phase("evaluation"):
                metrics |= evaluate(config, prompts, parts, done=done)
        if config.run.checkpoint_every and _due(done, config.run.checkpoint_every, last):
            with watch.phase("checkpoint"):
                parts.save(done)
        measured = watch.timings(step.response_tokens) | watch.memory()
        parts.logger.log(metrics | measured, step=done)


def evaluate(
    config: Config, prompts: PromptSet, parts: TrainerParts, *, done: int
) -> Mapping[str, float]:
    """Measure the mean reward on held-out prompts after `done` rollouts; return metrics.

    Each prompt has one sample, at the training temperature. Collective.
    """
    held_out = parts.policy.replica.share(prompts.held_out[: config.evaluation.prompts])
    started = time.perf_counter()
    drawn = draw(parts, held_out, samples=1, stream=EVALUATION_STREAM + done)
    groups = score(parts.scorer, drawn)
    return evaluation_metrics(groups, seconds=time.perf_counter() - started)


def draw(
    parts: TrainerParts, prompts: Sequence[Prompt], *, samples: int, stream: int
) -> list[tuple[Prompt, tuple[Sample, ...]]]:
    """Draw `samples` responses to each of this rank's prompts; collective if engines are shared.

    A sample depends on the seed, `stream`, the prompt's row, its own index and the weights. It does
    not depend on the number of ranks nor, up to the rounding of logits, on other samples.
    """
    requests = [
        request
        for prompt in prompts
        for request in parts.requests.make(prompt, stream=stream, samples=samples)
    ]
    found = parts.generate(requests)
    return [
        (prompt, tuple(found[place * samples : (place + 1) * samples]))
        for place, prompt in enumerate(prompts)
    ]


def score(scorer: Scorer, drawn: Sequence[tuple[Prompt, tuple[Sample, ...]]]) -> list[RolloutGroup]:
    """Have the verifier score samples; return each prompt's samples and rewards as a group.

    It is local to the rank.
    """
    return [
        RolloutGroup(
            id=prompt.row, prompt=prompt, samples=samples, rewards=scorer.rewards(prompt, samples)
        )
        for prompt, samples in drawn
    ]


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def work(job: Job) -> None:
    """Train as one rank until the job is done. Collective over the default process group."""
    rank = get_rank()
    config = job.config
    with output_to(job.out / "logs" / f"rank-{rank}.log") as terminal, ExitStack() as stack:
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
            requests=RequestMaker.of(config, tokenizer),
            generate=engines.generate,
            scorer=Scorer(load_reward(config.task.reward), tokenizer),
            recipe=GrpoRecipe(config, tokenizer, positions=started.positions),
            policy=policy,
            publish=publish,
            save=checkpoints.save,
            logger=logger,
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
