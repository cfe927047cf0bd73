"""An asynchronous run, from its job to its results: the controller's process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from megatron_idempotent.controller import Controller, Fleet
from megatron_idempotent.controller.ping import SOCKET_FILE, PingError, PingServer
from megatron_idempotent.controller.watch.chart import TIMELINE_CHART, draw_timeline
from megatron_idempotent.controller.watch.table import LiveTable, keep_showing, make_table
from megatron_idempotent.controller.watch.timeline import Timeline
from megatron_idempotent.cpu import RankPool
from megatron_idempotent.sync import SyncSettings
from megatron_idempotent.trainer.job import INITIAL, TRAINED, Job
from megatron_idempotent.trainer.rollout.make import MB
from megatron_idempotent.trainer.rollout.requests import RequestMaker
from megatron_idempotent.trainer.stream.cluster import connect
from megatron_idempotent.trainer.stream.engines import make_engines
from megatron_idempotent.trainer.stream.plane import make_plane
from megatron_idempotent.trainer.stream.policy import RankPolicy
from megatron_idempotent.trainer.stream.prompts import PromptStream
from megatron_idempotent.trainer.stream.ranks import make_ranks
from megatron_idempotent.trainer.stream.recipe import GrpoRecipe
from megatron_idempotent.trainer.stream.score import Evaluation, Scorer
from megatron_idempotent.trainer.stream.settings import last_version, make_sampler, make_settings
from megatron_idempotent.trainer.stream.store import CheckpointStore
from megatron_idempotent.trainer.task.prompts import PromptSet
from megatron_idempotent.trainer.task.reward import load_reward
from megatron_idempotent.trainer.task.tokenizer import make_tokenizer, sequence_positions
from megatron_idempotent.trainer.watch.loggers import make_loggers
from megatron_idempotent.workers import RankGroup, RemoteWeights

TRACE_FILE = "timeline.json"


def run_controller(job: Job, prompts: PromptSet, *, pool: RankPool | None = None) -> bool:
    """Run the job's controller in this process; whether it came to its end.

    `pool` is a launcher that embedded ranks are forked by; None for one of their own.

    False where it was told to stop by SIGTERM: then a checkpoint has been written, to be continued.
    Errors: `controller.ControllerError`, `workers.RanksLost` and what a part of the run raised.
    """
    # The engines here share the cores with the ranks; more threads would fight for them.
    torch.set_num_threads(1)
    connect(job.config)
    return asyncio.run(_run(job, prompts, pool))


async def _run(job: Job, prompts: PromptSet, pool: RankPool | None) -> bool:
    async with AsyncExitStack() as stack:
        ranks = make_ranks(job, pool=pool)
        stack.push_async_callback(ranks.close)
        await ranks.start()
        timeline = (
            Timeline(tracks=("train", "weights", "rollouts"))
            if job.config.controller.timeline
            else None
        )
        last = last_version(job.config)
        table = None if job.quiet else make_table(sys.stderr, until=last)
        controller = await _controller(job, prompts, ranks, timeline, table, stack)
        if timeline is not None:
            stack.push_async_callback(asyncio.to_thread, _save_timeline, timeline, job.out)
        await _answer_pings(controller, job, stack)
        if job.resume_from is not None:
            await controller.resume()
        if table is not None:
            showing = asyncio.ensure_future(keep_showing(table, controller.ping))
            stack.callback(showing.cancel)
        with _drained_by_sigterm(controller):
            status = await controller.run(until=last)
        if status.trainer_version < last:
            return False
        await ranks.call("save_hf", str(job.out / TRAINED))
        return True


async def _controller(
    job: Job,
    prompts: PromptSet,
    ranks: RankGroup,
    timeline: Timeline | None,
    table: LiveTable | None,
    stack: AsyncExitStack,
) -> Controller:
    config = job.config
    tokenizer = make_tokenizer(config, prompts)
    requests = RequestMaker.of(config, tokenizer)
    scorer = Scorer(load_reward(config.task.reward), tokenizer)
    checkpoint = Path(config.model.path) if config.model.path else job.out / INITIAL
    engines = await make_engines(config, checkpoint, job.out)
    fleet = Fleet(
        engines,
        source=RemoteWeights(
            ranks,
            asyncio.get_running_loop(),
            timeout_s=config.controller.call_timeout_s,
        ),
        requests=lambda group_id, prompt: requests.make(
            prompt, stream=group_id, samples=config.rollout.group_size
        ),
        score=scorer,
        settings=SyncSettings(bucket_bytes=config.sync.bucket_mb * MB),
        changed_only=config.sync.changed_only,
    )
    stack.push_async_callback(fleet.close)
    positions = sequence_positions(
        prompts, tokenizer, max_response_tokens=config.rollout.max_response_tokens
    )
    plane = make_plane(config)
    stack.push_async_callback(plane.close)
    steps = config.optimizer.steps_per_rollout
    loggers = make_loggers(job, *([table] if table is not None else []), threaded=True)
    stack.push_async_callback(asyncio.to_thread, loggers.close)
    return Controller(
        settings=make_settings(config),
        sampler=make_sampler(config),
        prompts=PromptStream(prompts.train, seed=config.run.seed),
        generator=fleet,
        policy=RankPolicy(ranks, timeout_s=config.controller.call_timeout_s),
        recipe=GrpoRecipe(config, tokenizer, positions=positions),
        plane=plane,
        store=CheckpointStore(job, ranks),
        loggers=loggers,
        timeline=timeline,
        evaluate=Evaluation(
            fleet,
            requests,
            scorer,
            prompts.held_out[: config.evaluation.prompts],
            every=config.evaluation.every * steps,
            last=last_version(config),
        ),
    )


async def _answer_pings(controller: Controller, job: Job, stack: AsyncExitStack) -> None:
    try:
        server = PingServer(controller.ping, job.out / SOCKET_FILE)
        await stack.enter_async_context(server)
    except PingError as error:
        print(f"no ping: {error}", file=sys.stderr)  # the file system may have no sockets


def _save_timeline(timeline: Timeline, out: Path) -> None:
    """Leave the trace and its picture in the output directory."""
    try:
        timeline.write(out / TRACE_FILE)
        draw_timeline(timeline, out / TIMELINE_CHART)
    except OSError as error:
        # The run is over and its weights are written: a full disk must not make it a failure.
        print(f"no timeline: {error}", file=sys.stderr)


@contextlib.contextmanager
def _drained_by_sigterm(controller: Controller) -> Iterator[None]:
    """SIGTERM ends the run with a checkpoint, within the limits of its settings."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def drain() -> None:
        draining.append(asyncio.ensure_future(controller.drain()))

    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
