"""Runs an asynchronous job in the controller's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path

import torch

from megatron_idempotent.proof.cpu import RankPool
from megatron_idempotent.rl import controller as async_controller
from megatron_idempotent.rl.controller.samplers import configured_sampler
from megatron_idempotent.rl.controller.state import ControllerLimits
from megatron_idempotent.rl.controller.status_file import STATUS_FILE, StatusError, StatusFile
from megatron_idempotent.rl.metrics.console import StatusTable, keep_showing
from megatron_idempotent.rl.metrics.timeline import Timeline
from megatron_idempotent.rl.sync import RemoteWeights, SyncSettings
from megatron_idempotent.rl.trainer.task.prompts import PromptSet, PromptStream
from megatron_idempotent.rl.trainer.task.reward import load_reward
from megatron_idempotent.rl.trainer.task.tokenizer import make_tokenizer
from megatron_idempotent.rl.weights.transports import Sender
from megatron_idempotent.rl.workers import RankGroup
from megatron_idempotent.rl.workers.ray import import_ray

from . import ConfigError
from .async_ranks import RankPolicy, make_ranks
from .checkpoint import CheckpointStore
from .config import Config
from .engines import local_sender, make_async_engines
from .output import SYNC, TRAINED, Job
from .policy import training_positions
from .report import make_loggers
from .rewards import Evaluation, GrpoRecipe, Scorer, make_requests


def make_sampler(config: Config) -> async_controller.Sampler:
    """Make the configured sampler, which decides which groups of samples start and train.

    Raises:
        SettingsError: the sampler or an option is invalid.
    """
    controller = config.controller
    return configured_sampler(
        controller.sampler,
        window=controller.max_staleness,
        order=controller.order,
        gated=controller.gated,
        abort_stale=controller.abort_stale,
    )


def make_settings(config: Config) -> async_controller.ControllerSettings:
    """Make the asynchronous controller's settings from the configuration.

    Raises:
        SettingsError: a setting is invalid.
    """
    controller, models = config.controller, config.loss.logprob_models
    limits = {field.name: getattr(controller, field.name) for field in fields(ControllerLimits)}
    return async_controller.ControllerSettings(
        **limits,
        target_groups=config.rollout.prompts,
        group_size=config.rollout.group_size,
        train_global_batch_size=config.global_batch_size,
        logprobs="both" if len(models) == 2 else models[0] if models else "none",
        checkpoint_every=config.run.checkpoint_every,
    )


def connect(config: Config) -> None:
    """Connect this process to Ray, if the configuration uses Ray; otherwise do nothing.

    Raises:
        ConfigError: there is no cluster at the address.
        ModuleNotFoundError: Ray is not installed; the command says so before.
    """
    controller = config.controller
    if controller.cluster != "ray" and controller.plane != "transfer_queue":
        return
    ray = import_ray()
    if ray.is_initialized():
        return
    address = controller.ray_address or os.environ.get("RAY_ADDRESS")
    if not address:
        # Enough for all actors: they share this machine, even if it has fewer cores.
        cpus = config.run.ranks * controller.cpus_per_rank + 4
        cpus += controller.engines * controller.cpus_per_engine
        ray.init(
            "local",  # else it would join a cluster that `ray start` has left running
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
        )
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"controller.ray_address is {address!r}: {error}; start a cluster there, or leave it "
            "empty for one on this machine"
        ) from error


TRACE_FILE = "timeline.json"


def run_controller(job: Job, prompts: PromptSet, *, pool: RankPool | None = None) -> bool:
    """Run the job's controller in this process; return whether the run is complete.

    If SIGTERM stops the run, it writes a checkpoint to resume from, and returns False. `pool` is an
    existing launcher for embedded ranks; None to make one.

    Raises:
        ControllerError: the run cannot continue.
        RanksLost: ranks are gone and could not be restored.
        Exception: the error of a component of the run.
    """
    # Engines in this process share the cores with the ranks.
    torch.set_num_threads(1)
    connect(job.config)
    return asyncio.run(_run(job, prompts, pool))


async def _run(job: Job, prompts: PromptSet, pool: RankPool | None) -> bool:
    async with AsyncExitStack() as stack:
        ranks = make_ranks(job, pool=pool)
        stack.push_async_callback(ranks.close)
        await ranks.start()
        job.say("building the model, and starting engines")
        last = job.config.last_version
        table = None if job.quiet else StatusTable(sys.stderr, until=last)
        controller = await _controller(job, prompts, ranks, table, stack)
        try:
            await stack.enter_async_context(StatusFile(controller.ping, job.out / STATUS_FILE))
        except StatusError as error:
            print(f"the run continues without a status file: {error}", file=sys.stderr)
        if job.resume_from is not None:
            await controller.resume()
        if table is not None:
            showing = asyncio.ensure_future(keep_showing(table, controller.ping))
            stack.callback(showing.cancel)
        job.say("the first rollout")
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
    table: StatusTable | None,
    stack: AsyncExitStack,
) -> async_controller.Controller:
    config = job.config
    tokenizer = make_tokenizer(config, prompts)
    scorer = Scorer(load_reward(config.task.reward), tokenizer)
    stack.callback(_remove_if_empty, job.out / SYNC)  # left by a file transport
    weights = RemoteWeights(
        ranks,
        asyncio.get_running_loop(),
        timeout_s=config.controller.call_timeout_s,
        transport=_transport(job),
    )
    fleet = async_controller.Fleet(
        await make_async_engines(job, weights),
        source=weights,
        requests=lambda group_id, prompt: make_requests(
            config, tokenizer, prompt, stream=group_id, samples=config.rollout.group_size
        ),
        score=scorer,
        settings=SyncSettings(bucket_bytes=config.sync.bucket_bytes),
        deltas=config.sync.deltas,
    )
    stack.push_async_callback(fleet.close)
    plane: async_controller.DataPlane = async_controller.MemoryPlane()
    if config.controller.plane == "transfer_queue":
        from megatron_idempotent.rl.controller.data_plane import TransferQueuePlane

        plane = TransferQueuePlane()
    stack.push_async_callback(plane.close)
    loggers = make_loggers(job, table, threaded=True)
    stack.push_async_callback(asyncio.to_thread, loggers.close)
    timeline = None
    if config.controller.timeline:
        timeline = Timeline(tracks=("train", "weights", "rollouts"))
        stack.push_async_callback(asyncio.to_thread, _save_timeline, timeline, job.out)
    return async_controller.Controller(
        settings=make_settings(config),
        sampler=make_sampler(config),
        prompts=PromptStream(prompts.train, seed=config.run.seed),
        generator=fleet,
        policy=RankPolicy(
            ranks,
            config.layout,
            timeout_s=config.controller.call_timeout_s,
            meet=config.parallel.ep > 1,
        ),
        recipe=GrpoRecipe(
            config, tokenizer, positions=training_positions(config, prompts, tokenizer)
        ),
        plane=plane,
        store=CheckpointStore(job, ranks),
        loggers=loggers,
        timeline=timeline,
        evaluate=Evaluation(config, fleet, tokenizer, scorer, prompts.held_out),
    )


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is missing, or has other files
        folder.rmdir()


def _transport(job: Job) -> Callable[[], Sender] | None:
    """Return a factory of senders that send the ranks' weights to this process, for the engines in
    it; None if no engine is in this process.
    """
    config = job.config
    in_process = config.rollout.engine == "transformers" and config.controller.cluster != "ray"
    return local_sender(job) if in_process else None


def _save_timeline(timeline: Timeline, out: Path) -> None:
    """Write the timeline of the run, a trace, into the output directory; print a warning if that
    fails.
    """
    try:
        timeline.write(out / TRACE_FILE)
    except OSError as error:
        # The run is complete: a full disk must not make it fail.
        print(f"no timeline: {error}", file=sys.stderr)


@contextlib.contextmanager
def _drained_by_sigterm(controller: async_controller.Controller) -> Iterator[None]:
    """Let SIGTERM call `controller.drain()` within the block, so that the run stops with a
    checkpoint instead of being killed.
    """
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def drain() -> None:
        draining.append(asyncio.ensure_future(controller.drain()))

    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
