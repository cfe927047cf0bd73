"""Ends an optimizer step once, or undoes it, even if the caller is cancelled meanwhile.

`train` takes a whole step over one batch that way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_idempotent.rl.workers.protocol import RanksLost

from .protocol import Policy, StepFailed, StepOutcome

_log = logging.getLogger(__name__)


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


async def update_once(
    call: Callable[[str], Awaitable[StepOutcome]], step_id: str, *, limit_s: float
) -> tuple[StepOutcome, bool]:
    """Make a step's update; return its outcome, and whether the caller was cancelled meanwhile.

    A call that raises is made once more with the step's id, since the update may have been made:
    the policy makes none twice. After a cancellation it has `limit_s` seconds to end.
    Errors: `CancelledError` if it failed and the caller was cancelled; `RanksLost`, also if it
        hangs after a cancellation; what the policy raised the second time.
    """

    async def asked_twice() -> StepOutcome:
        try:
            return await call(step_id)
        except RanksLost:
            raise
        except Exception as error:  # noqa: BLE001 (asked again: it may have been carried out)
            _log.warning("the update of step %s raised, and is asked for again: %r", step_id, error)
            return await call(step_id)

    updating = asyncio.ensure_future(asked_twice())
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
    policy: Policy, batch: Any, *, step_id: str, attempts: int = 3, abort_s: float = 300.0
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
    whole = getattr(policy, "train", None)  # of a `OneShotPolicy`
    update = policy.finish if whole is None else lambda name: whole(name, batch)
    last: BaseException | None = None
    for attempt in range(attempts):
        name = f"{step_id}/{attempt}"
        try:
            if whole is None:
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
