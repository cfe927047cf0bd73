"""Takes one optimizer step from groups as they arrive, or from one batch; undoes it if it fails.

Each call of the policy ends or is undone, even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_idempotent.rl.workers.protocol import RanksLost

from .protocol import (
    DataPlane,
    Held,
    LogprobsOf,
    OneShotPolicy,
    Policy,
    PublishFailed,
    Recipe,
    RolloutGroup,
    StepFailed,
    StepOutcome,
)
from .samplers import SamplerError, checked_evict, checked_select
from .state import PendingDeletes, RunState

_log = logging.getLogger(__name__)


class Drained(Exception):
    """The run is being drained, so no more groups are trained."""


class OutOfPrompts(Exception):
    """The stream of prompts has ended, and too few groups are left for a step."""


class GroupSelector:
    """Chooses the groups that train next, and leases them to the open step.

    Example: `held = await selector.next(1)`.
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
                    elif shared.exhausted and not shared.buffer.counts.generating:
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
        selector: GroupSelector,
        plane: DataPlane,
        policy: Policy,
        recipe: Recipe,
    ) -> None:
        self._shared = shared
        self._selector = selector
        self._plane = plane
        self._policy = policy
        self._recipe = recipe
        # What was taken together stays together: the sum of a gradient depends on it.
        self._held: list[list[Held]] = []
        self.before_finish: Callable[[], Awaitable[None]] = _nothing
        self.interrupted = False
        """True if the task was cancelled during an update, and the update was made nevertheless."""

    async def take(self, name: str) -> tuple[Sequence[RolloutGroup], StepOutcome]:
        """Take the step; return the groups that were trained, and the step's result.

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
                self._held.append(await self._selector.next(most))
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
        """Hand the groups of one call to the policy; return them.

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
        """Return whether a step that was undone is taken again; drop a group that is lost."""
        # Of a sampler that is wrong, no group is to blame, and none has trained.
        final = (asyncio.CancelledError, PublishFailed, SamplerError, *self._selector.expected)
        if isinstance(error, final):
            return False
        if isinstance(error, _Vanished):
            self._give_up(error.group_id)
        self._shared.retries["step"] += 1
        _log.warning("step %s failed and is undone: %r", step_id, error)
        return True


async def finish_despite_cancel(task: asyncio.Future[Any], limit_s: float | None = None) -> bool:
    """Wait until a task is done, however often the caller is cancelled meanwhile.

    Returns whether the caller was cancelled, which then has to raise `CancelledError` itself.
    After the first cancellation it waits up to `limit_s` seconds; a task that is not done by then
    goes on running.

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


async def finish_once(policy: Policy, step_id: str, *, limit_s: float) -> tuple[StepOutcome, bool]:
    """Finish a step; return its outcome, and whether the caller was cancelled meanwhile.

    A finish that raises is asked for once more by the step's id, since the update may have been
    made. After a cancellation it has `limit_s` seconds to end.
    Errors: `CancelledError` if it failed and the caller was cancelled; `RanksLost`, also if it
        hangs after a cancellation; what the policy raised the second time.
    """
    return await _update(lambda: policy.finish(step_id), f"finish of step {step_id}", limit_s)


async def undo(policy: Policy, step_id: str, *, limit_s: float) -> None:
    """Abort a step within `limit_s` seconds, also if the caller is cancelled meanwhile.

    Errors: `RanksLost` if the abort raises or takes longer; `CancelledError` after the abort if the
        caller was cancelled.
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
    policy: Policy,
    batch: Any,
    *,
    step_id: str,
    attempts: int = 3,
    abort_s: float = 300.0,
) -> StepOutcome:
    """Take one optimizer step over one batch: `begin`, `microbatch` and `finish` in one call.

    A policy with a `train` of its own (`OneShotPolicy`) takes it in one round trip to its ranks. An
    attempt that fails is undone, and made again under another id. If the caller is cancelled, the
    step is undone, except that an update that is under way, or a call of the policy's own `train`,
    first runs to its end; then `CancelledError` is raised.

    Args:
        policy: must have no open step.
        batch: an argument of `Policy.microbatch`.
        step_id: a name that no other step has, ever; attempts are `step_id/0`, `step_id/1`, ….
        attempts: attempts before the step is given up, 1 or more.
        abort_s: seconds for ranks to undo a step, and to end an update after a cancellation.

    Errors: `StepFailed` after the last attempt: the weights have not changed; `RanksLost`;
        `ValueError` for attempts below 1.
    Example: `outcome = await train(policy, batch, step_id="run-7/12")`.
    """
    if attempts < 1:
        raise ValueError(f"attempts is {attempts}; allowed: 1 or more")
    last: BaseException | None = None
    for attempt in range(attempts):
        name = f"{step_id}/{attempt}"
        try:
            outcome, cancelled = await _attempt(policy, batch, name, abort_s)
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


async def _attempt(
    policy: Policy, batch: Any, step_id: str, limit_s: float
) -> tuple[StepOutcome, bool]:
    if hasattr(policy, "train"):
        one_shot: OneShotPolicy = policy  # type: ignore[assignment] # it has all of the methods
        return await _update(
            lambda: one_shot.train(step_id, batch), f"training of step {step_id}", limit_s
        )
    await policy.begin(step_id)
    await policy.microbatch(step_id, batch, microbatch_id=f"{step_id}/0", last=True)
    return await finish_once(policy, step_id, limit_s=limit_s)


async def _update(
    call: Callable[[], Awaitable[StepOutcome]], what: str, limit_s: float
) -> tuple[StepOutcome, bool]:
    """Make an idempotent call, and once more if it raises; see `finish_once` for the rest."""
    updating = asyncio.ensure_future(_asked_twice(call, what))
    cancelled = await finish_despite_cancel(updating, limit_s)
    if not updating.done():
        updating.cancel()
        raise RanksLost(f"the {what} did not end in {limit_s:g} s after a cancellation")
    error = updating.exception()
    if cancelled and error is not None and not isinstance(error, RanksLost):
        raise asyncio.CancelledError from error
    return updating.result(), cancelled


async def _asked_twice(call: Callable[[], Awaitable[StepOutcome]], what: str) -> StepOutcome:
    try:
        return await call()
    except RanksLost:
        raise
    except Exception as error:  # noqa: BLE001 (asked again: it may have been carried out)
        # By the step's id it is not made twice; without this its groups would train again.
        _log.warning("the %s raised, and is asked for again: %r", what, error)
        return await call()
