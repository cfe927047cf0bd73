"""What to do with one engine after something went wrong: ask it, put it right, or give it up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_idempotent.rollout import (
    EngineDead,
    EngineHealth,
    EngineTimeout,
    RolloutEngine,
)
from megatron_idempotent.weights import WeightUpdate

from .records import EngineOutcome, Outcome, SyncSettings


async def bounded(engine: RolloutEngine, what: str, call: Awaitable[Any], limit_s: float) -> Any:
    """The call's result, or `EngineTimeout` naming the engine and what it was told."""
    try:
        return await asyncio.wait_for(call, limit_s)
    except asyncio.TimeoutError as error:
        raise EngineTimeout(
            f"engine {engine.name} has not finished {what} in {limit_s:g} s; its health says what "
            f"it did, and {what}_timeout_s is the limit"
        ) from error


async def ask(engine: RolloutEngine, settings: SyncSettings) -> EngineHealth:
    """The engine's health; one that raises, against its contract, or does not answer is DEAD."""
    try:
        found: EngineHealth = await bounded(
            engine, "resume", engine.health(), settings.resume_timeout_s
        )
        return found
    except Exception as error:  # noqa: BLE001 (a third party's engine; any error is its answer)
        return EngineHealth(status="DEAD", version=None, detail=repr(error))


async def attempts(
    engine: RolloutEngine,
    what: str,
    call: Callable[[], Awaitable[Any]],
    done: Callable[[EngineHealth], bool],
    settings: SyncSettings,
    limit_s: float,
) -> str:
    """Try until the engine's health says that it is done; returns the last error, or nothing.

    Health is asked after every attempt, failed or not: a call may time out and be carried out, or
    come back and not be.
    """
    error = ""
    for attempt in range(settings.attempts):
        if attempt:
            await asyncio.sleep(settings.retry_wait_s)
        try:
            await bounded(engine, what, call(), limit_s)
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

    Rolls back, which leaves an update alone that is committed in full, and resumes only what then
    says that its weights are of one version. An engine that is DIRTY is never resumed. One that had
    not staged the update does not have it, whatever number its own version has.
    """
    await attempts(
        engine,
        "rollback",
        lambda: engine.rollback(update.id),
        lambda health: health.status in ("SERVING", "PAUSED"),
        settings,
        settings.commit_timeout_s,
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
    """Resume an engine of a known version; `reason` says why it is not the newest, if it is not."""
    error = await attempts(
        engine,
        "resume",
        engine.resume,
        lambda health: (health.status, health.version) == ("SERVING", version),
        settings,
        settings.resume_timeout_s,
    )
    if error:
        detail = f"{reason}; {error}" if reason else error
        return EngineOutcome(outcome="quarantined", version=None, detail=detail)
    outcome: Outcome = "behind" if reason else "committed"
    return EngineOutcome(outcome=outcome, version=version, detail=reason)


def given_up(health: EngineHealth, reason: str) -> EngineOutcome:
    """That of an engine that must not serve, as its health says."""
    detail = f"{reason}; it is {health.status}" + (f": {health.detail}" if health.detail else "")
    return EngineOutcome(outcome="quarantined", version=None, detail=detail)
