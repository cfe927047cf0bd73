"""Runs rollouts and training concurrently in one event loop, and restores a run that lost ranks."""

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
    """Raise `Stalled` once the run has made no progress for `stall_s` seconds; never returns.

    Raises:
        Stalled: the message says what each part of the run does or waits for.
    """
    limit_s = shared.settings.stall_s
    while True:
        # An absolute deadline: a remaining difference may round to less than a tick of the clock.
        now_s, deadline_s = shared.measure.now(), shared.idle_since + limit_s
        if now_s >= deadline_s:
            idle_s = now_s - shared.idle_since
            raise Stalled(
                f"no progress in {idle_s:.0f} s (stall_s is {limit_s:g}): {progress_of(shared)}; "
                "raise stall_s if it is only slow"
            )
        await asyncio.sleep(deadline_s - now_s)


def progress_of(shared: RunState) -> str:
    """Return one line on a run's progress: what the training loop does, versions, counts of groups,
    drops and retries.
    """
    counts = shared.buffer.counts
    generating = list(shared.buffer.generating_ids)
    first_ids = ", ".join(map(str, generating[:8])) + (", …" if len(generating) > 8 else "")
    last = f" (the last one for {shared.dropped_for})" if shared.dropped_for else ""
    return (
        f"the train pump is at {shared.doing or 'its start'!r} of version "
        f"{shared.trainer_version}, engines serve version {shared.rollout_version}, "
        f"{counts.generating} groups are being generated ({first_ids or 'none'}), "
        f"{counts.ready} are ready, {shared.step_groups} are in the open step; room for "
        f"{shared.room()} more; dropped so far: {dict(shared.dropped) or 'none'}{last}; "
        f"tried again: {dict(shared.retries) or 'none'}"
    )


async def look_for_engines(shared: RunState) -> None:
    """Check every `look_again_s` seconds whether an engine has recovered after all engines were
    lost. If so, set `engines_back`, so that the training loop publishes the weights again; never
    returns.
    """
    while True:
        await asyncio.sleep(shared.settings.look_again_s)
        if shared.engines_back:
            continue
        try:
            is_back = await shared.generator.recover()
        except Exception as error:  # noqa: BLE001 (the next check may succeed)
            _log.warning("looking for engines: %r", error)
            continue
        if is_back:
            shared.engines_back = True
            shared.tell()


class Controller:
    """Trains a policy on rollouts as they complete, and publishes the policy's weights to the
    engines.

    Groups start as capacity and staleness allow, and every group is trained exactly once despite
    failures: a failed step is undone and repeated with the same groups, lost ranks are restored
    from the newest checkpoint together with the buffer, and an engine that recovers gets the newest
    weights. Call `run` from one task; `ping` and `drain` from any.

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
        """Check the settings, and connect the parts of the run; `run` starts it.

        Args:
            settings: sizes and limits of the run.
            sampler: decides which groups start, which train next, and which are too stale.
            prompts: returns the prompt at an index.
            generator: turns prompts into scored groups; `Fleet` does so with engines.
            policy: the model and optimizer that are trained.
            recipe: turns groups into batches, and rejects useless groups.
            plane: stores complete groups until they are trained; None for this process's memory.
            store: writes and restores checkpoints; without one, lost ranks end the run.
            loggers: get a row of metrics per optimizer step, in a separate thread, and all rows
                before `run` returns; a logger that raises is dropped. A `metrics.loggers.Loggers`
                is used as it is: if it is not threaded, it runs in the event loop.
            timeline: records the phases of all pumps.
            evaluate: evaluates a version; its metrics go into the version's row. If it has a
                method `due(version)`, training waits for a publish only at versions that are due.

        Raises:
            SettingsError: the capacity or the staleness window would deadlock the run.
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

        Versions count from the run's very beginning, before any resume. Another call may continue
        to a later version; with a deterministic sampler the weights then equal those of one longer
        run. It returns early when the run is drained or prompts have run out.

        After an error or a cancellation, rollouts are cancelled and queued again, the open step is
        undone, and `run` may be called again.

        Raises:
            ControllerError: the run cannot continue.
            Exception: the error of a policy, recipe or store.
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
            await self._stored.clear([])  # groups that an earlier call failed to clear
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

        Raises:
            ControllerError: the checkpoint has other settings.
            Exception: the store's error.
        """
        await self._checkpoints.restore(starting=True)
        return self._shared.trainer_version

    async def ping(self) -> Status:
        """Return a snapshot of the run, without waiting for anything."""
        return status_of(self._shared)

    async def drain(self) -> None:
        """End the run early, with a checkpoint; return when `run` has returned.

        No more groups start, the open step finishes (or is undone after `drain_s` seconds), and a
        checkpoint is written.
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
                # At the limit, the cancelled step undoes itself and returns its groups to the
                # buffer.
                training.cancel()
        await self._ended.wait()

    async def _train(self, until: int) -> None:
        """Run the rollout and training loops to version `until`; if ranks are lost, restore the
        newest checkpoint and run the loops again.
        """
        shared, checkpoints = self._shared, self._checkpoints
        restarts, steps = 0, shared.train_steps
        while True:
            try:
                if checkpoints.unrestored:
                    await checkpoints.restore()
                # At the last version already: pumps would only start groups and cancel them.
                is_finished = shared.current and shared.trainer_version >= until
                if not (is_finished or shared.draining):
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
        """Run the training loop, the rollout loop, the watchdog and the search for engines
        concurrently, until the training loop returns or any of them raises; then stop all.
        """
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
                # Complete all groups: a resumed run would sample the missing ones in another batch.
                await self._rollouts.finish(shared.settings.drain_s)
        finally:
            self._train_task = None
            stopping = asyncio.ensure_future(self._stop(tasks))
            cancelled = await finish_despite_cancel(stopping)
            results = stopping.result()
            if any(isinstance(result, RanksLost) for result in results):
                # Set here too: when the caller cancels the run, `_train` does not see this error.
                self._checkpoints.unrestored = self._checkpoints.store is not None
        if cancelled:
            raise asyncio.CancelledError
        errors = [result for result in results if isinstance(result, Exception)]
        # The loss of ranks first: it causes the others.
        for error in sorted(errors, key=lambda exception: not isinstance(exception, RanksLost)):
            raise error

    async def _stop(self, tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self._rollouts.stop()
        return results
