"""Takes optimizer steps on groups as they arrive, and publishes weights after each outer step.

A step is either completed once or undone, even if the caller is cancelled. `train` takes a complete
step on one batch with the same guarantee.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.workers.protocol import RanksLost

from .checkpoint import Checkpoints, Reporting
from .protocol import (
    EnginesLost,
    Held,
    LogprobsOf,
    Policy,
    PublishFailed,
    RolloutGroup,
    StepFailed,
    StepOutcome,
)
from .samplers import SamplerError, chosen
from .state import RunState, StoredGroups

_log = logging.getLogger(__name__)


async def finish_despite_cancel(task: asyncio.Future[Any], limit_s: float | None = None) -> bool:
    """Wait until a task is done, even if the caller is cancelled meanwhile, once or repeatedly.
    Return True if it was cancelled. From the first cancellation on, wait at most `limit_s` more
    seconds, if given.

    A cancelled caller must raise `CancelledError` itself. A task that is not done in time keeps
    running.

    Example: `await finish_despite_cancel(asyncio.ensure_future(policy.finish(step_id)), 300)`.
    """
    clock = asyncio.get_running_loop().time
    cancelled, until = False, None
    while not task.done():
        timeout = None if until is None else until - clock()
        if timeout is not None and timeout <= 0:
            break
        try:
            await asyncio.wait([task], timeout=timeout)
        except asyncio.CancelledError:
            if not cancelled and limit_s is not None:
                until = clock() + limit_s
            cancelled = True
    return cancelled


async def update_once(
    call: Callable[[str], Awaitable[StepOutcome]], step_id: str, *, limit_s: float
) -> tuple[StepOutcome, bool]:
    """Await `call(step_id)`, which makes the weight update of an optimizer step, and do not stop if
    the caller is cancelled. Return the outcome, and True if the caller was cancelled.

    If the call raises, except for `RanksLost`, it is repeated once with the same step id, because
    it may have made the update; the policy never makes an update twice. After a cancellation both
    calls have `limit_s` seconds to end.

    Raises:
        CancelledError: the update failed, and the caller was cancelled.
        RanksLost: ranks are gone, or the update hangs after a cancellation.
        Exception: the policy's error at the second call.
    """

    async def with_one_retry() -> StepOutcome:
        try:
            return await call(step_id)
        except RanksLost:
            raise
        except Exception as error:  # noqa: BLE001 (repeated: the update may have been made)
            _log.warning("the update of step %s raised, and is repeated: %r", step_id, error)
            return await call(step_id)

    updating = asyncio.ensure_future(with_one_retry())
    cancelled = await finish_despite_cancel(updating, limit_s)
    if not updating.done():
        updating.cancel()
        raise RanksLost(
            f"the update of step {step_id} did not end in {limit_s:g} s after a cancellation"
        )
    error = updating.exception()
    if cancelled and error is not None and not isinstance(error, RanksLost):
        raise asyncio.CancelledError from error
    return updating.result(), cancelled


async def undo(policy: Policy, step_id: str, *, limit_s: float) -> None:
    """Abort the policy's open step, even if the caller is cancelled meanwhile. Raise `RanksLost` if
    that fails or takes longer than `limit_s` seconds.

    Raises:
        RanksLost: the abort raised or took longer.
        CancelledError: the caller was cancelled; raised after the abort.
    """
    aborting = asyncio.ensure_future(asyncio.wait_for(policy.abort(step_id), limit_s))
    cancelled = await finish_despite_cancel(aborting)
    try:
        aborting.result()
    except RanksLost:
        raise
    except asyncio.TimeoutError as error:
        raise RanksLost(f"step {step_id} is not undone in {limit_s:g} s") from error
    except Exception as error:
        raise RanksLost(f"step {step_id} could not be undone: {error!r}") from error
    if cancelled:
        raise asyncio.CancelledError


async def train(
    policy: Policy, batch: Any, *, step_id: str, attempts: int = 3, abort_s: float = 300.0
) -> StepOutcome:
    """Take one optimizer step on one batch by `begin`, `microbatch` and `finish`. A failed attempt
    is undone and repeated under a new id, up to `attempts` times in all.

    A policy with a method `train` (`OneShotPolicy`) does this in one round trip to its ranks. If
    the caller is cancelled, the step is undone, but a running update or call of the policy's
    `train` first completes; then `CancelledError` is raised.

    Args:
        policy: must have no open step.
        batch: an argument of `Policy.microbatch`.
        step_id: a name that is unique among all steps; attempts are `step_id/0`, `step_id/1`, ….
        attempts: the number of attempts, 1 or more.
        abort_s: seconds for ranks to undo a step, and to end an update after a cancellation.

    Raises:
        StepFailed: all attempts failed; the weights are unchanged.
        RanksLost: ranks are gone.
        ValueError: `attempts` is below 1.

    Example: `outcome = await train(policy, batch, step_id="run-7/12")`.
    """
    if attempts < 1:
        raise ValueError(f"attempts is {attempts}; allowed: 1 or more")
    one_call = getattr(policy, "train", None)  # of a `OneShotPolicy`
    update = policy.finish if one_call is None else lambda name: one_call(name, batch)
    last: BaseException | None = None
    for attempt in range(attempts):
        name = f"{step_id}/{attempt}"
        try:
            if one_call is None:
                await policy.begin(name)
                await policy.microbatch(name, batch, microbatch_id=f"{name}/0", last=True)
            outcome, cancelled = await update_once(update, name, limit_s=abort_s)
        except RanksLost:
            raise
        except (Exception, asyncio.CancelledError) as error:
            await undo(policy, name, limit_s=abort_s)
            if isinstance(error, asyncio.CancelledError):
                raise
            _log.warning("step %s failed and is undone: %r", name, error)
            last = error
        else:
            if cancelled:
                raise asyncio.CancelledError
            return outcome
    raise StepFailed(
        f"step {step_id} failed {attempts} times with the same batch, and was undone each time: "
        f"{last!r}"
    ) from last


class NoMoreGroups(Exception):
    """No step can be taken: the run is draining, or prompts have run out and too few groups are
    left.
    """


class _Vanished(Exception):
    """The data plane has lost a group that is complete according to the buffer."""

    def __init__(self, group_id: int) -> None:
        super().__init__(f"group {group_id} is not in the data plane any more")
        self.group_id = group_id


class TrainPump:
    """The loop that takes optimizer steps, counts them in `trainer_version`, and publishes weights
    to the engines.

    Example: `await TrainPump(shared, stored, …).run(until=600)`.
    """

    def __init__(
        self, shared: RunState, stored: StoredGroups, reporting: Reporting, checkpoints: Checkpoints
    ) -> None:
        self._shared, self._stored = shared, stored
        self._reporting, self._checkpoints = reporting, checkpoints
        self._publishing: asyncio.Task[None] | None = None
        # The groups of the open step, per call. A repeated step makes the same calls, because the
        # sum of gradients depends on them.
        self._held: list[list[Held]] = []
        # The prefix of all step ids, unique to this process.
        self._run_name = uuid.uuid4().hex[:8]
        self._begun = 0
        # True if the task was cancelled during an update that was still made.
        self._interrupted = False

    async def run(self, until: int) -> None:
        """Take optimizer steps until version `until`, or until the run is drained or prompts have
        run out.

        Raises:
            Exception: as in `_take` and `_publish`.
        """
        shared = self._shared
        if not shared.current:
            await self._publish()
            if shared.trainer_version == 0:
                await self._checkpoints.before_release(0)
        if shared.trainer_version < until:
            self._release_rollouts()
        try:
            # A drain ends between outer steps: engines then have the weights that a resume
            # publishes.
            while shared.trainer_version < until and not (
                shared.draining and shared.trainer_version % shared.settings.minibatches == 0
            ):
                try:
                    groups, outcome = await self._take()
                except NoMoreGroups:
                    break
                extra: Mapping[str, float] = {}
                try:
                    await self._clear(groups)
                    if shared.trainer_version % shared.settings.minibatches == 0:
                        extra = await self._hand_over(last=shared.trainer_version >= until)
                finally:
                    # Even if one of these raised: the update is made, so its row is logged.
                    self._reporting.step(groups, outcome, extra)
                    if self._publishing is None:
                        self._reporting.release()
                await self._checkpoints.save()
            await self._settled()
        finally:
            try:
                await self._stop_publishing()
            finally:
                self._reporting.release()

    # An optimizer step --------------------------------------------------------------------------

    async def _take(self) -> tuple[Sequence[RolloutGroup], StepOutcome]:
        """Take one optimizer step on the next groups; a failed attempt is undone and repeated.
        Return the groups and the outcome.

        A failed step is aborted and repeated with the same groups, in up to `step_attempts`
        attempts. After an error all groups are ready in the buffer again, and none is trained.

        Raises:
            StepFailed: all attempts failed.
            RanksLost: ranks are gone.
            Exception: as in `_next_groups`.
        """
        shared = self._shared
        self._begun += 1
        name = f"{self._run_name}/{shared.trainer_version}/{self._begun}"
        last: BaseException | None = None
        try:
            failures = 0
            for attempt in itertools.count():
                if failures == shared.settings.step_attempts:
                    break
                step_id = f"{name}/{attempt}"
                try:
                    return await self._attempt(step_id)
                except RanksLost:
                    raise
                except (Exception, asyncio.CancelledError) as error:
                    shared.doing = "abort"
                    await undo(shared.policy, step_id, limit_s=shared.settings.abort_s)
                    if not self._may_try_again(step_id, error):
                        raise
                    last = error
                    # A lost group does not count as a failure: the other groups are fine.
                    failures += not isinstance(error, _Vanished)
            raise StepFailed(
                f"step {name} failed {shared.settings.step_attempts} times with the same "
                f"{len(self._ids())} groups, and was undone each time: {last!r}"
            ) from last
        finally:
            # After a success there are no ids left.
            shared.buffer.give_back(self._ids())
            self._held = []
            shared.step_groups = 0

    async def _attempt(self, step_id: str) -> tuple[Sequence[RolloutGroup], StepOutcome]:
        shared, count = self._shared, self._shared.settings.groups_per_step
        # The groups whose gradients are in this attempt.
        ledger: list[RolloutGroup] = []
        for call in itertools.count():
            if len(ledger) == count:
                break
            shared.step_groups = len(ledger)
            if call == len(self._held):
                most = min(shared.settings.groups_per_call, count - len(ledger))
                self._held.append(await self._next_groups(most))
            ledger += await self._add(step_id, call, lacking=count - len(ledger))
            shared.progressed()
        # A running publish still reads the weights that the update changes.
        await self._settled()
        with shared.measure.phase("policy_training", step=step_id, part="finish"):
            shared.doing = "finish"
            outcome, self._interrupted = await update_once(
                shared.policy.finish, step_id, limit_s=shared.settings.abort_s
            )
        # First, before anything can fail: the update is made, so its groups are trained.
        shared.buffer.trained(self._ids())
        self._held = []
        shared.trainer_version += 1
        shared.train_steps += 1
        return ledger, outcome

    async def _next_groups(self, most: int) -> list[Held]:
        """Wait until the sampler selects at least `min_groups_per_call` groups, at most `most`;
        lease these groups from the buffer, and return them.

        `most` is the number of groups that the step can still take. With a sampler that drains,
        whose steps are deterministic, it waits for exactly `most` groups.

        Raises:
            NoMoreGroups: the run is draining, or no further groups will complete.
            SamplerError: the sampler failed.
            Exception: as in `_republish`.
        """
        shared = self._shared
        fewest = min(shared.settings.min_groups_per_call, most)
        fewest = most if shared.sampler.drains else fewest
        groups = await self._selected(most)
        if len(groups) < fewest:
            with shared.measure.phase("exposed_generation"):
                while len(groups) < fewest:
                    shared.doing = "waiting for groups"
                    if shared.draining:
                        raise NoMoreGroups
                    if shared.engines_back or shared.publish_failed:
                        await self._republish()
                    elif shared.exhausted and not shared.buffer.counts.generating:
                        raise NoMoreGroups
                    else:
                        await shared.change()
                    groups = await self._selected(most)
        shared.buffer.lease([group.id for group in groups])
        shared.progressed()  # the lease freed room in the buffer
        return groups

    async def _selected(self, most: int) -> list[Held]:
        """Evict stale groups from the buffer, and return the groups that the sampler selects from
        the others.
        """
        shared, version = self._shared, self._shared.trainer_version
        stale = chosen(shared.sampler, "evict", shared.buffer.ready, version=version)
        for group in stale:
            shared.buffer.drop(group.id, "evicted")
        if stale:
            shared.tell()
            await self._stored.clear([group.id for group in stale])
        ready = shared.buffer.ready
        return list(chosen(shared.sampler, "select", ready, version=version, count=most))

    async def _add(self, step_id: str, call: int, *, lacking: int) -> list[RolloutGroup]:
        """Run one call of the policy in the step `step_id`: fetch the groups that are leased for
        `call`, compute their log-probs, make a batch of them, and run forward and backward on it.
        Return the groups. The first call begins the step.

        `lacking` is the number of groups that the step lacked before this call.
        """
        shared, leased = self._shared, self._held[call]
        measure, policy, recipe = shared.measure, shared.policy, shared.recipe
        ids = [group.id for group in leased]
        groups = []
        with measure.phase("prepare_logprobs", groups=ids):
            shared.doing = "log-probs"
            for group_id in ids:
                try:
                    groups.append(await self._stored.plane.get(group_id))
                except KeyError as error:
                    raise _Vanished(group_id) from error
            inputs = recipe.inputs(groups)
            logprobs: dict[LogprobsOf, object] = {
                which: await policy.logprobs(inputs, which)
                for which in shared.settings.logprob_models
            }
        with measure.phase("advantage_pump", groups=ids):
            batch = recipe.batch(groups, inputs, logprobs)
        with measure.phase("policy_training", groups=ids):
            shared.doing = "microbatch"
            if call == 0:
                await policy.begin(step_id)
            await policy.microbatch(
                step_id, batch, microbatch_id=f"{step_id}/{call}", last=len(leased) == lacking
            )
        return groups

    def _ids(self) -> list[int]:
        return [group.id for call_groups in self._held for group in call_groups]

    def _may_try_again(self, step_id: str, error: BaseException) -> bool:
        """Return whether to try a step again that failed and was undone. If it failed because the
        data plane has lost a group, remove this group from the step and the buffer; another one
        takes its place.
        """
        # These errors are not caused by the groups.
        if isinstance(error, (asyncio.CancelledError, PublishFailed, SamplerError, NoMoreGroups)):
            return False
        if isinstance(error, _Vanished):  # another group takes its place in the step
            self._shared.buffer.give_back([error.group_id])
            self._shared.lose(error.group_id)
            remaining = [
                [group for group in leased if group.id != error.group_id] for leased in self._held
            ]
            self._held = [leased for leased in remaining if leased]
        self._shared.retries["step"] += 1
        _log.warning("step %s failed and is undone: %r", step_id, error)
        return True

    async def _clear(self, groups: Sequence[RolloutGroup]) -> None:
        shared = self._shared
        with shared.measure.phase("clear_samples"):
            shared.doing = "clear"
            await self._stored.clear([group.id for group in groups])
        shared.progressed()
        if self._interrupted:
            self._interrupted = False
            raise asyncio.CancelledError

    # Weights to the engines ---------------------------------------------------------------------

    async def _hand_over(self, *, last: bool) -> Mapping[str, float]:
        """End an outer step: publish the weights to the engines, and let groups start with them.
        Wait for the publish, and return the metrics of an evaluation, if the sampler's `drains` is
        True, or this version is evaluated, saved or the last. Otherwise return {} at once; the
        publish then runs during the next step.
        """
        shared = self._shared
        if not (shared.sampler.drains or last or self._checkpoints.work_at(shared.trainer_version)):
            # The next step may begin: weights change only at its update.
            self._publishing = asyncio.ensure_future(self._publish_and_release())
            return {}
        if shared.sampler.drains:
            await self._all_generated()
        await self._publish()
        metrics = await self._checkpoints.before_release(shared.trainer_version)
        if not last:
            # After the last step no groups start; a next `run` starts them.
            self._release_rollouts()
        return metrics

    async def _all_generated(self) -> None:
        """Wait until all groups that may start with the engines' current weights have started and
        are complete, or the run is drained.
        """
        shared = self._shared
        with shared.measure.phase("exposed_generation"):
            while (shared.room() or shared.buffer.counts.generating) and not shared.draining:
                shared.doing = "waiting for all groups of the version"
                if shared.engines_back:
                    await self._republish()
                else:
                    await shared.change()

    async def _publish(self, *, during_step: bool = False) -> None:
        """Publish the current weights to the engines. A failed publish is repeated, without limit
        while no engine is left, otherwise in up to `step_attempts` attempts.

        `during_step` is True for a publish that runs during the next step.

        Raises:
            RanksLost: ranks are gone.
            PublishFailed: it failed `step_attempts` times although engines were alive.
        """
        shared, version = self._shared, self._shared.trainer_version
        if not during_step:
            shared.doing = f"publishing version {version}"
        shared.publish_failed = False
        failures = 0
        with shared.measure.phase("sync_weights", track="weights", version=version):
            while True:
                try:
                    shared.sync_metrics = await shared.generator.publish(version)
                    break
                except RanksLost:
                    raise
                except Exception as error:
                    shared.retries["publish"] += 1
                    # Without engines, retry until the watchdog ends the run.
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
        self._reporting.release()  # the row of this version waits for the publish
        shared.measure.mark("train", f"version {version}")
        shared.progressed()

    async def _publish_and_release(self) -> None:
        try:
            await self._publish(during_step=True)
        except Exception:
            self._shared.publish_failed = True
            self._shared.tell()
            raise
        self._release_rollouts()

    async def _republish(self) -> None:
        """Wait for the publish that runs during the step, if there is one. Then, if all engines
        were lost and one has recovered, publish the weights again, and wait for that.

        Raises:
            Exception: as in `_publish`, also for the publish that failed during the step.
        """
        await self._settled()
        if self._shared.engines_back:
            await self._publish()
            self._release_rollouts()

    def _release_rollouts(self) -> None:
        """Let groups start with the last published weights."""
        self._shared.rollout_version = self._shared.published
        self._shared.permitted = True
        self._shared.progressed()

    async def _settled(self) -> None:
        """Wait for the publish that `_hand_over` has left running during the step. If there is
        none: no-op.

        Raises:
            Exception: as in `_publish`.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            with self._shared.measure.phase("exposed_sync"):
                self._shared.doing = "waiting for the publishing of weights"
                try:
                    await asyncio.shield(publishing)
                except asyncio.CancelledError:
                    self._publishing = publishing
                    raise

    async def _stop_publishing(self) -> None:
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.cancel()
            ended = asyncio.gather(publishing, return_exceptions=True)
            if await finish_despite_cancel(ended):
                raise asyncio.CancelledError
