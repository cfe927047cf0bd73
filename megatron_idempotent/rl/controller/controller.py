"""Runs rollouts and training side by side in one event loop, and restores a run that lost ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from megatron_idempotent.rl.metrics.loggers import Logger, Loggers
from megatron_idempotent.rl.metrics.timeline import Timeline
from megatron_idempotent.rl.workers.protocol import RanksLost

from .buffer import GroupBuffer
from .checkpoint import Checkpoints, Evaluate, Reporting
from .data_plane import MemoryPlane
from .protocol import (
    ControllerError,
    DataPlane,
    Generator,
    Policy,
    Prompts,
    Recipe,
    Sampler,
    Stalled,
    Status,
    Store,
)
from .rollout_loop import RolloutPump
from .state import ControllerSettings, Measure, RunState, StoredGroups, status_of
from .train_loop import TrainPump, finish_despite_cancel

_log = logging.getLogger(__name__)


async def watchdog(shared: RunState) -> None:
    """Raise once nothing has made progress for `stall_s` seconds; never returns.

    Errors: `Stalled`, which says what each part of the run does or waits for.
    """
    limit_s = shared.settings.stall_s
    while True:
        # The moment itself: what is left of a sum of differences may be too little for any clock.
        now, until = shared.measure.now(), shared.idle_since + limit_s
        if now >= until:
            idle_s = now - shared.idle_since
            raise Stalled(
                f"no progress in {idle_s:.0f} s (stall_s is {limit_s:g}): {where(shared)}; raise "
                "stall_s if it is only slow"
            )
        await asyncio.sleep(until - now)


def where(shared: RunState) -> str:
    """Describe the state of a run in one line."""
    counts = shared.buffer.counts
    generating = list(shared.buffer.generating_ids)
    shown = ", ".join(map(str, generating[:8])) + (", …" if len(generating) > 8 else "")
    last = f" (the last one for {shared.dropped_for})" if shared.dropped_for else ""
    return (
        f"the train pump is at {shared.doing or 'its start'!r} of version "
        f"{shared.trainer_version}, engines serve version {shared.rollout_version}, "
        f"{counts.generating} groups are being generated ({shown or 'none'}), {counts.ready} are "
        f"ready, {shared.step_groups} are in the open step; room for {shared.room()} more; dropped "
        f"so far: {dict(shared.dropped) or 'none'}{last}; tried again: "
        f"{dict(shared.retries) or 'none'}"
    )


async def look_for_engines(shared: RunState) -> None:
    """Ask every `look_again_s` seconds whether an engine answers after all were lost.

    It sets `engines_back` when one does; never returns.
    """
    while True:
        await asyncio.sleep(shared.settings.look_again_s)
        if shared.engines_back:
            continue
        try:
            found = await shared.generator.recover()
        except Exception as error:  # noqa: BLE001 (an engine's; the next look may find it well)
            _log.warning("looking for engines: %r", error)
            continue
        if found:
            shared.engines_back = True
            shared.tell()


class Controller:
    """Streams rollouts into optimizer steps, and weights back to the engines.

    Groups are started as capacity and staleness allow, train as they arrive, and count exactly
    once, whatever fails: a step that fails is undone and taken again with the same groups, lost
    ranks are restored from the newest checkpoint together with the buffer, and an engine that comes
    back is given the newest weights. Call `run` from one task; `ping` and `drain` from any.

    Example:
        controller = Controller(settings=settings, sampler=WindowedSampler(2), prompts=prompts,
            generator=fleet, policy=policy, recipe=recipe)
        await controller.run(until=600)
    """

    def __init__(
        self,
        *,
        settings: ControllerSettings,
        sampler: Sampler,
        prompts: Prompts,
        generator: Generator,
        policy: Policy,
        recipe: Recipe,
        plane: DataPlane | None = None,
        store: Store | None = None,
        loggers: Sequence[Logger] | Loggers = (),
        timeline: Timeline | None = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        """
        Args:
            settings: sizes and limits of the run.
            sampler: decides which groups start, which train next, and which are too old.
            prompts: gives the prompt at an index.
            generator: makes scored groups of prompts; `Fleet` does so with engines.
            policy: the model and optimizer that are trained.
            recipe: turns groups into batches, and says which groups are of no use.
            plane: keeps complete groups until they are trained; None for this process's memory.
            store: writes and restores checkpoints; without one, lost ranks end the run.
            loggers: get a row of metrics per optimizer step, in a thread of their own, and all rows
                before `run` returns; one that raises is dropped. A `metrics.loggers.Loggers` is
                used as it is: one that is not threaded calls its loggers in the event loop.
            timeline: records what all pumps do.
            evaluate: evaluates a version; its metrics go into the version's row. Where it has a
                method `due(version)`, training does not wait for the publishing of other versions.

        Errors: `SettingsError` for a capacity, or a window of staleness, that would deadlock.
        """
        capacity = settings.checked_capacity(sampler)
        self._shared = shared = RunState(
            settings=settings,
            sampler=sampler,
            prompts=prompts,
            generator=generator,
            policy=policy,
            recipe=recipe,
            measure=Measure(timeline),
            buffer=GroupBuffer(capacity),
        )
        self._reporting = reporting = Reporting(shared, loggers)
        self._stored = stored = StoredGroups(shared, plane if plane is not None else MemoryPlane())
        self._checkpoints = Checkpoints(shared, stored, reporting, store, evaluate)
        self._rollouts = RolloutPump(shared, stored)
        self._training = TrainPump(shared, stored, reporting, self._checkpoints)
        self._train_task: asyncio.Task[None] | None = None
        self._ended: asyncio.Event | None = None

    async def run(self, until: int) -> Status:
        """Train until the weights have version `until`; return the run's status.

        Versions count from the run's very beginning, before any resume. It may be called again with
        a later version: with a deterministic sampler the weights are then those of one longer run.
        It returns early once it is drained, or prompts have run out.
        Errors: `ControllerError`, and what a policy, recipe or store raised. Rollouts are cancelled
            then, to be asked for again, and the open step is undone; the same happens where the
            caller's task is cancelled. It may be called again after either.
        """
        shared, checkpoints = self._shared, self._checkpoints
        if shared.state in ("running", "draining"):
            raise ControllerError("run() was called while it runs; wait for it to return")
        shared.state = "running"
        checkpoints.until = until
        shared.exhausted = False
        self._ended = ended = asyncio.Event()
        shared.progressed()
        self._reporting.open()
        self._reporting.begin()
        try:
            await self._train(until)
            if checkpoints.due_early:
                await checkpoints.capture()
                await checkpoints.save()
            await self._stored.clear([])  # what could not be cleared earlier
        finally:
            try:
                await self._reporting.close()
            finally:
                shared.state = "ended"
                ended.set()
        return await self.ping()

    async def resume(self) -> int:
        """Restore the newest checkpoint before `run`; return its version, 0 without a checkpoint.

        The controller must have a store.
        Errors: those of the store; `ControllerError` for a checkpoint of other settings.
        """
        await self._checkpoints.restore(starting=True)
        return self._shared.trainer_version

    async def ping(self) -> Status:
        """Return the state of the run, without waiting for anything."""
        return status_of(self._shared)

    async def drain(self) -> None:
        """End the run early, and return when `run` has.

        No more groups are started, the open step is finished, or is undone after `drain_s` seconds,
        and a checkpoint is written.
        """
        shared = self._shared
        if shared.state not in ("running", "draining") or self._ended is None:
            return
        training = self._train_task
        if shared.state == "running":
            shared.state = "draining"
            shared.tell()
            if training is not None:
                await asyncio.wait([training], timeout=shared.settings.drain_s)
                # After its limit: undone by the step itself, with its groups in the buffer again.
                training.cancel()
        await self._ended.wait()

    async def _train(self, until: int) -> None:
        """Run the pumps until that version, again from the newest checkpoint if ranks are lost."""
        shared, checkpoints = self._shared, self._checkpoints
        restarts, steps = 0, shared.train_steps
        while True:
            try:
                if checkpoints.unrestored:
                    await checkpoints.restore()
                # A run that stands there already starts no groups, which it would only cancel.
                there = shared.current and shared.trainer_version >= until
                if not (there or shared.draining):
                    await self._pump(until)
                return
            except RanksLost as error:
                checkpoints.unrestored = checkpoints.store is not None
                restarts = 1 if shared.train_steps > steps else restarts + 1
                steps = shared.train_steps
                if checkpoints.store is None or restarts > shared.settings.restarts:
                    raise
                _log.error("policy ranks are lost (restart %d): %s", restarts, error)

    async def _pump(self, until: int) -> None:
        """Run all pumps until the train pump is done or one of them raises, then stop them all."""
        shared = self._shared
        self._train_task = train = asyncio.ensure_future(self._training.run(until))
        tasks = [
            train,
            asyncio.ensure_future(self._rollouts.run()),
            asyncio.ensure_future(watchdog(shared)),
            asyncio.ensure_future(look_for_engines(shared)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if train.done() and shared.draining and shared.sampler.drains:
                # Whole, or a resumed run would sample the rest of them in another batch.
                await self._rollouts.finish(shared.settings.drain_s)
        finally:
            self._train_task = None
            stopping = asyncio.ensure_future(self._stop(tasks))
            cancelled = await finish_despite_cancel(stopping)
            results = stopping.result()
            if any(isinstance(each, RanksLost) for each in results):
                # Told here too: a caller that cancels the run does not get to see it.
                self._checkpoints.unrestored = self._checkpoints.store is not None
        if cancelled:
            raise asyncio.CancelledError
        errors = [e for e in results if isinstance(e, Exception)]
        # Of several, what the ranks' loss brought about is not the cause.
        for error in sorted(errors, key=lambda each: not isinstance(each, RanksLost)):
            raise error

    async def _stop(self, tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self._rollouts.stop()
        return results
