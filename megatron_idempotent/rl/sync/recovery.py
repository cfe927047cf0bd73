"""Asks an engine for its state after an error, repairs it, or gives it up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from megatron_idempotent.rl.engines import EngineDead, EngineHealth, EngineTimeout, RolloutEngine
from megatron_idempotent.rl.weights import WeightUpdate

from .records import EngineOutcome, Outcome, SyncSettings

Answer = TypeVar("Answer")

#: The setting that limits a call.
_LIMITS = {
    "pause": "pause_timeout_s",
    "commit": "commit_timeout_s",
    "rollback": "commit_timeout_s",
    "resume": "resume_timeout_s",
    "wake": "resume_timeout_s",
    "health": "resume_timeout_s",
}


async def bounded(
    engine: RolloutEngine, what: str, call: Awaitable[Answer], settings: SyncSettings
) -> Answer:
    """Return the call's result.

    Errors: the call's own; `EngineTimeout` naming the engine, the call and its limit.
    """
    limit_s: float = getattr(settings, _LIMITS[what])
    try:
        return await asyncio.wait_for(call, limit_s)
    except asyncio.TimeoutError as error:
        raise EngineTimeout(
            f"engine {engine.name} has not finished {what} in {limit_s:g} s; its health says what "
            f"it did, and {_LIMITS[what]} is the limit"
        ) from error


async def ask(engine: RolloutEngine, settings: SyncSettings) -> EngineHealth:
    """Return the engine's health; DEAD if it does not answer or, against its contract, raises."""
    try:
        return await bounded(engine, "health", engine.health(), settings)
    except Exception as error:  # noqa: BLE001 (a third party's engine; any error is its answer)
        return EngineHealth(status="DEAD", version=None, detail=repr(error))


async def attempts(
    engine: RolloutEngine,
    what: str,
    call: Callable[[], Awaitable[Any]],
    done: Callable[[EngineHealth], bool],
    settings: SyncSettings,
) -> str:
    """Call until `done` says so of the engine's health; return the last error, or "".

    Health is asked after every attempt, failed or not: a call that times out may have been carried
    out, and one that comes back may not.
    """
    error = ""
    for attempt in range(settings.attempts):
        if attempt:
            await asyncio.sleep(settings.retry_wait_s)
        try:
            await bounded(engine, what, call(), settings)
        except Exception as failure:  # noqa: BLE001 (whatever it is, the engine's health decides)
            error = f"{what} failed: {failure}"
            dead = isinstance(failure, EngineDead)
        else:
            error, dead = f"{what} came back, and health does not show it", False
        health = await ask(engine, settings)
        if done(health):
            return ""
        if dead or health.status == "DEAD":
            return f"{error}; {health.detail or 'it does not answer'}"
        error += f" (it is {health.status} at version {health.version})"
    return error


async def settle(
    engine: RolloutEngine,
    update: WeightUpdate,
    reason: str,
    settings: SyncSettings,
    *,
    had_staged: bool,
) -> EngineOutcome:
    """Bring an engine that was interrupted in an update to one known version, or give it up.

    It rolls the engine back, which changes nothing if the update is committed in full, and resumes
    it only if it then says that its weights are of one version. An engine that is DIRTY is never
    resumed. An engine that had not staged the update does not have it, even if its version has the
    same number.
    """
    await attempts(
        engine,
        "rollback",
        lambda: engine.rollback(update.id),
        lambda health: health.status in ("SERVING", "PAUSED"),
        settings,
    )
    health = await ask(engine, settings)
    if health.status not in ("SERVING", "PAUSED") or health.version is None:
        return given_up(health, reason)
    # One that says SERVING too: a pause that came too late may still be under way.
    has_it = had_staged and health.version == update.version
    found = await resume(engine, health.version, "" if has_it else reason, settings)
    if has_it and found.outcome == "quarantined":
        return dataclasses.replace(found, detail=f"{reason}; {found.detail}")
    return found


async def resume(
    engine: RolloutEngine, version: int, reason: str, settings: SyncSettings
) -> EngineOutcome:
    """Resume an engine of a known version, and return its outcome.

    `reason` says why the version is not the newest; "" if it is.
    """
    error = await attempts(
        engine,
        "resume",
        engine.resume,
        lambda health: (health.status, health.version) == ("SERVING", version),
        settings,
    )
    if error:
        detail = f"{reason}; {error}" if reason else error
        return EngineOutcome(outcome="quarantined", version=None, detail=detail)
    outcome: Outcome = "behind" if reason else "committed"
    return EngineOutcome(outcome=outcome, version=version, detail=reason)


def given_up(health: EngineHealth, reason: str) -> EngineOutcome:
    """Return the outcome of an engine that must not serve, with its health as the detail."""
    detail = f"{reason}; it is {health.status}" + (f": {health.detail}" if health.detail else "")
    return EngineOutcome(outcome="quarantined", version=None, detail=detail)
