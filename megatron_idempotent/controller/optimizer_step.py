"""Takes one optimizer step from groups as they arrive; undoes it and tries again if it fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from megatron_idempotent.workers.protocol import RanksLost

from .policy_calls import finish_once, undo
from .protocol import (
    DataPlane,
    Held,
    LogprobsOf,
    Policy,
    PublishFailed,
    Recipe,
    RolloutGroup,
    StepFailed,
    StepOutcome,
)
from .samplers import SamplerError, checked_evict, checked_select
from .state import PendingDeletes, RunState


class Drained(Exception):
    """The run is being drained, so no more groups are trained."""


class OutOfPrompts(Exception):
    """The stream of prompts has ended, and too few groups are left for a step."""


class GroupSelector:
    """Chooses the groups that train next, and leases them to the open step.

    Example: `held = await intake.next(1)`.
    """

    #: `next` raises these for reasons that are not a step's failure.
    expected = (Drained, OutOfPrompts)

    def __init__(
        self, shared: RunState, clearing: PendingDeletes, republish: Callable[[], Awaitable[None]]
    ) -> None:
        """Take the run's state; `republish` sends weights to engines that answer again.

        It raises if they cannot be sent.
        """
        self._shared = shared
        self._clearing = clearing
        self._republish = republish

    async def next(self, most: int) -> list[Held]:
        """Wait for at least `min_groups_per_call` groups that may train, and lease up to `most`.

        `most` is what the step can still take; the wait is for no more than that. With a sampler
        that drains, whose steps are deterministic, it waits for exactly `most`.
        Errors: `Drained`; `OutOfPrompts`; `SamplerError`; those of `republish`.
        """
        shared = self._shared
        fewest = min(shared.settings.min_groups_per_call, most)
        fewest = most if shared.sampler.drains else fewest
        found = await self._try(most)
        if len(found) < fewest:
            with shared.measure.phase("exposed_generation"):
                while len(found) < fewest:
                    shared.doing = "waiting for groups"
                    if shared.draining:
                        raise Drained
                    if shared.engines_back or shared.publish_failed:
                        await self._republish()
                    elif self._nothing_to_come():
                        raise OutOfPrompts
                    else:
                        await shared.change()
                    found = await self._try(most)
        shared.buffer.lease([held.id for held in found])
        shared.progressed()  # and their places in the buffer are free
        return found

    async def _try(self, most: int) -> list[Held]:
        await self._evict()
        shared = self._shared
        chosen = checked_select(
            shared.sampler, shared.buffer.ready, version=shared.trainer_version, count=most
        )
        return list(chosen)

    async def _evict(self) -> None:
        shared = self._shared
        stale = checked_evict(shared.sampler, shared.buffer.ready, version=shared.trainer_version)
        if not stale:
            return
        for held in stale:
            shared.buffer.drop(held.id, "evicted", "stale")
        shared.tell()
        await self._clearing.clear([held.id for held in stale])

    def _nothing_to_come(self) -> bool:
        return self._shared.exhausted and not self._shared.buffer.counts.generating


_log = logging.getLogger(__name__)


async def _nothing() -> None:
    """Do nothing, where there is nothing to wait for."""


class _Vanished(Exception):
    """The data plane does not have a group that is complete according to the buffer."""

    def __init__(self, group_id: int) -> None:
        super().__init__(f"group {group_id} is not in the data plane any more")
        self.group_id = group_id


class OptimizerStep:
    """Hands groups to the policy as they come, and makes one update from them.

    Example: `groups, outcome = await OptimizerStep(run, groups, plane, policy, recipe).take("7")`.
    """

    def __init__(
        self,
        shared: RunState,
        intake: GroupSelector,
        plane: DataPlane,
        policy: Policy,
        recipe: Recipe,
    ) -> None:
        self._shared = shared
        self._intake = intake
        self._plane = plane
        self._policy = policy
        self._recipe = recipe
        # What was taken together stays together: the sum of a gradient depends on it.
        self._held: list[list[Held]] = []
        self.before_finish: Callable[[], Awaitable[None]] = _nothing
        self.interrupted = False
        """True if the task was cancelled during an update, and the update was made nevertheless."""

    async def take(self, name: str) -> tuple[Sequence[RolloutGroup], StepOutcome]:
        """Takes the step; returns the groups that were trained, and the step's result.

        A step that fails is aborted and taken again with the same groups, `step_attempts` times.
        No other step, in any process, may have the name `name`.
        Errors: `StepFailed` after the last attempt; `RanksLost`; what `GroupSelector.next` raises.
            Then all groups are ready in the buffer again, and none counts as trained.
        """
        shared = self._shared
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
                    await undo(self._policy, step_id, limit_s=shared.settings.abort_s)
                    if not self._may_try_again(step_id, error):
                        raise
                    last = error
                    # A group that is lost says nothing of the others, and cannot be lost twice.
                    failures += not isinstance(error, _Vanished)
            raise StepFailed(
                f"step {name} failed {shared.settings.step_attempts} times with the same "
                f"{len(self._ids())} groups, and was undone each time: {last!r}"
            ) from last
        finally:
            # None are left of a step that succeeded.
            shared.buffer.give_back(self._ids())
            self._held = []
            shared.step_groups = 0

    async def _attempt(self, step_id: str) -> tuple[Sequence[RolloutGroup], StepOutcome]:
        shared, count = self._shared, self._shared.settings.groups_per_step
        # The groups whose gradients are in this attempt; one that fails drops them all.
        ledger: list[RolloutGroup] = []
        for call in itertools.count():
            if len(ledger) == count:
                break
            shared.step_groups = len(ledger)
            if call == len(self._held):
                most = min(shared.settings.groups_per_call, count - len(ledger))
                self._held.append(await self._intake.next(most))
            ledger += await self._add(step_id, call, left=count - len(ledger))
            shared.progressed()
        # The update would change weights that are still being read.
        await self.before_finish()
        with shared.measure.phase("policy_training", step=step_id, part="finish"):
            shared.doing = "finish"
            outcome, self.interrupted = await finish_once(
                self._policy, step_id, limit_s=shared.settings.abort_s
            )
        shared.buffer.trained(self._ids())
        self._held = []
        return ledger, outcome

    async def _add(self, step_id: str, call: int, *, left: int) -> list[RolloutGroup]:
        """Hand the groups of one call to the policy; returns them.

        `left` is the number of groups that the step lacked before this call.
        """
        measure, recipe, held = self._shared.measure, self._recipe, self._held[call]
        ids = [each.id for each in held]
        with measure.phase("prepare_logprobs", groups=ids):
            self._shared.doing = "log-probs"
            groups = [await self._get(group_id) for group_id in ids]
            inputs = recipe.inputs(groups)
            logprobs: dict[LogprobsOf, object] = {
                which: await self._policy.logprobs(inputs, which)
                for which in self._shared.settings.asked
            }
        with measure.phase("advantage_pump", groups=ids):
            batch = recipe.batch(groups, inputs, logprobs)
        with measure.phase("policy_training", groups=ids):
            self._shared.doing = "microbatch"
            if call == 0:
                await self._policy.begin(step_id)
            await self._policy.microbatch(
                step_id, batch, microbatch_id=f"{step_id}/{call}", last=len(held) == left
            )
        return groups

    async def _get(self, group_id: int) -> RolloutGroup:
        try:
            return await self._plane.get(group_id)
        except KeyError as error:
            raise _Vanished(group_id) from error

    def _give_up(self, group_id: int) -> None:
        """Drop a group that the data plane has lost; another takes its place in the step."""
        self._shared.buffer.give_back([group_id])
        self._shared.lose(group_id)
        self._held = [[held for held in together if held.id != group_id] for together in self._held]
        self._held = [together for together in self._held if together]

    def _ids(self) -> list[int]:
        return [held.id for held_together in self._held for held in held_together]

    def _may_try_again(self, step_id: str, error: BaseException) -> bool:
        """Returns whether a step that was undone is taken again; drops a group that is lost."""
        # Of a sampler that is wrong, no group is to blame, and none has trained.
        final = (asyncio.CancelledError, PublishFailed, SamplerError, *self._intake.expected)
        if isinstance(error, final):
            return False
        if isinstance(error, _Vanished):
            self._give_up(error.group_id)
        self._shared.retries["step"] += 1
        _log.warning("step %s failed and is undone: %r", step_id, error)
        return True
