"""Takes optimizer steps in turn, and publishes weights after each outer step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from megatron_idempotent.rl.workers.protocol import RanksLost

from .optimizer_step import Drained, OptimizerStep, OutOfPrompts, finish_despite_cancel
from .protocol import EnginesLost, Generator, PublishFailed, RolloutGroup, StepOutcome
from .state import PendingDeletes, RunState

_log = logging.getLogger(__name__)

Report = Callable[[Sequence[RolloutGroup], StepOutcome, Mapping[str, float]], None]
"""Takes the groups of one optimizer step, its outcome, and further metrics of the same version."""

AtVersion = Callable[[int], Awaitable[Mapping[str, float]]]
"""Is called with a version that engines have; returns metrics of it."""


class TrainPump:
    """Takes optimizer steps, counts them in `trainer_version`, and publishes weights.

    Example: `await TrainPump(shared, clearing, step, generator, …).run(until=600)`.
    """

    def __init__(
        self,
        shared: RunState,
        clearing: PendingDeletes,
        step: OptimizerStep,
        generator: Generator,
        *,
        report: Report,
        before_release: AtVersion,
        after_release: Callable[[], Awaitable[None]],
        due: Callable[[int], bool],
        run_name: str,
    ) -> None:
        """
        Args:
            shared: the state of the run.
            clearing: clears groups that were trained.
            step: takes one optimizer step.
            generator: publishes weights.
            report: is called once per optimizer step.
            before_release: is called with a published version before groups are started with it.
            after_release: is called once groups are started with a version; the policy's weights
                are still those of the version.
            due: says whether `before_release` or `after_release` has work for a version. If not,
                the next step does not wait for the publish.
            run_name: begins the ids of all steps; no other process may use the same.
        """
        self._shared = shared
        self._clearing = clearing
        self._step = step
        self._generator = generator
        self._report = report
        self._before_release = before_release
        self._after_release = after_release
        self._due = due
        self._run_name = run_name
        self._publishing: asyncio.Task[None] | None = None
        step.before_finish = self.settled
        self._begun = 0

    async def run(self, until: int) -> None:
        """Take steps until version `until`, or until the run is drained or prompts have run out.

        Errors: those of `OptimizerStep.take` and of `publish`.
        """
        shared = self._shared
        if not shared.current:
            shared.doing = f"publishing version {shared.trainer_version}"
            await self.publish()
            if shared.trainer_version == 0:
                await self._before_release(0)
        if shared.trainer_version < until:
            self._release_rollouts()
        try:
            while shared.trainer_version < until and not self._may_stop():
                try:
                    groups, outcome = await self._one_step()
                except (Drained, OutOfPrompts):
                    break
                extra: Mapping[str, float] = {}
                try:
                    await self._clear(groups)
                    if shared.trainer_version % shared.settings.minibatches == 0:
                        extra = await self._hand_over(last=shared.trainer_version >= until)
                finally:
                    # Also if one of these raised: the update is made, and has its row.
                    self._report(groups, outcome, extra)
            await self.settled()
        finally:
            await self._stop_publishing()

    async def settled(self) -> None:
        """Wait until the publish that is under way, if any, is done. Errors: those of `publish`."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            with self._shared.measure.phase("exposed_sync"):
                self._shared.doing = "waiting for the publishing of weights"
                try:
                    await asyncio.shield(publishing)
                except asyncio.CancelledError:
                    self._publishing = publishing
                    raise

    async def _hand_over(self, *, last: bool) -> Mapping[str, float]:
        """End an outer step: publish its weights, and let groups start with them; return metrics.

        Unless something has to be done at this version, the publish goes on during the next step.
        """
        shared = self._shared
        if not (shared.sampler.drains or last or self._due(shared.trainer_version)):
            # Weights do not change before the next update: the next step is on its way meanwhile.
            self._publishing = asyncio.ensure_future(self._publish_and_release())
            return {}
        if shared.sampler.drains:
            await self._all_generated()
        shared.doing = f"publishing version {shared.trainer_version}"
        await self.publish()
        metrics = await self._before_release(shared.trainer_version)
        if not last:
            # After the last step nothing is started: the next run does it, as if it went on.
            self._release_rollouts()
        await self._after_release()
        return metrics

    async def republish(self) -> None:
        """Publish again in the middle of a step, if all engines were lost and one answers now.

        Errors: those of `publish`, also of one that has failed during the step.
        """
        await self.settled()
        if self._shared.engines_back:
            await self.publish()
            self._release_rollouts()

    async def _publish_and_release(self) -> None:
        try:
            await self.publish()
        except Exception:
            self._shared.publish_failed = True
            self._shared.tell()
            raise
        self._release_rollouts()

    async def _stop_publishing(self) -> None:
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.cancel()
            ended = asyncio.gather(publishing, return_exceptions=True)
            if await finish_despite_cancel(ended):
                raise asyncio.CancelledError

    async def publish(self) -> None:
        """Publish the weights; try again for as long as no engine takes them.

        Errors: `RanksLost`; `PublishFailed` if it failed `step_attempts` times though engines were
            there.
        """
        shared = self._shared
        version = shared.trainer_version
        shared.publish_failed = False
        failures = 0
        with shared.measure.phase("sync_weights", track="weights", version=version):
            while True:
                try:
                    shared.sync_metrics = await self._generator.publish(version)
                    break
                except RanksLost:
                    raise
                except Exception as error:
                    shared.retries["publish"] += 1
                    # Without engines the watchdog has the last word: there is no progress.
                    failures += not isinstance(error, EnginesLost)
                    if failures >= shared.settings.step_attempts:
                        raise PublishFailed(
                            f"version {version} could not be published in {failures} attempts, "
                            f"as many as step_attempts allows: {error!r}"
                        ) from error
                    _log.warning("version %d is not published: %r", version, error)
                    await asyncio.sleep(shared.settings.look_again_s)
        shared.engines_back = False
        shared.published = version
        shared.measure.mark("train", f"version {version}")
        shared.progressed()

    def _release_rollouts(self) -> None:
        """Let groups start with the weights that were published last."""
        self._shared.rollout_version = self._shared.published
        self._shared.permitted = True
        self._shared.progressed()

    async def _one_step(self) -> tuple[Sequence[RolloutGroup], StepOutcome]:
        shared = self._shared
        self._begun += 1
        groups, outcome = await self._step.take(
            f"{self._run_name}/{shared.trainer_version}/{self._begun}"
        )
        # Before all else, which may fail: the update is made, and its groups are counted.
        shared.trainer_version += 1
        shared.train_steps += 1
        return groups, outcome

    async def _clear(self, groups: Sequence[RolloutGroup]) -> None:
        shared = self._shared
        with shared.measure.phase("clear_samples"):
            shared.doing = "clear"
            await self._clearing.clear([group.id for group in groups])
        shared.progressed()
        if self._step.interrupted:
            self._step.interrupted = False
            raise asyncio.CancelledError

    async def _all_generated(self) -> None:
        """Wait until every group that may be started with these weights is complete."""
        shared = self._shared
        with shared.measure.phase("exposed_generation"):
            while (shared.room() or shared.buffer.counts.generating) and not shared.draining:
                shared.doing = "waiting for all groups of the version"
                if shared.engines_back:
                    await self.republish()
                else:
                    await shared.change()

    def _may_stop(self) -> bool:
        """Return whether the run is being drained and an outer step has just ended.

        Between outer steps, engines have the weights that a resumed run would publish.
        """
        shared = self._shared
        return shared.draining and shared.trainer_version % shared.settings.minibatches == 0
