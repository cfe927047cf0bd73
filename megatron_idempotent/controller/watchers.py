"""Watches the pumps: the watchdog, and the probe for engines that come back."""

from __future__ import annotations

import asyncio
import logging

from .errors import Stalled
from .protocol import Generator
from .shared import Shared

_log = logging.getLogger(__name__)


async def watchdog(shared: Shared) -> None:
    """Look whether anything makes progress while work remains, for ever.

    Errors: `Stalled`, with what each part of the run does or waits for.
    """
    limit_s = shared.settings.stall_s
    while True:
        # The moment itself: what is left of a sum of differences may be too little for any clock.
        now, until = shared.measure.now(), shared.idle_since + limit_s
        if now >= until:
            idle_s = now - shared.idle_since
            raise Stalled(
                f"no progress in {idle_s:.0f} s (stall_s is {limit_s:g}): {where(shared)}"
            )
        await asyncio.sleep(until - now)


def where(shared: Shared) -> str:
    """Describes the state of a run in one line."""
    counts = shared.buffer.counts
    generating = list(shared.buffer.generating_ids)
    shown = ", ".join(map(str, generating[:8])) + (", …" if len(generating) > 8 else "")
    return (
        f"the train pump is at {shared.doing or 'its start'!r} of version "
        f"{shared.trainer_version}, engines serve version {shared.rollout_version}, "
        f"{counts.generating} groups are being generated ({shown or 'none'}), {counts.ready} are "
        f"ready, {shared.step_groups} are in the open step; room for {shared.room()} more; dropped "
        f"so far: {dict(shared.dropped) or 'none'}; tried again: {dict(shared.retries) or 'none'}"
    )


async def look_for_engines(shared: Shared, generator: Generator) -> None:
    """Look for engines that answer again after all were lost, for ever."""
    while True:
        await asyncio.sleep(shared.settings.look_again_s)
        if shared.engines_back:
            continue
        try:
            found = await generator.recover()
        except Exception as error:  # noqa: BLE001 (an engine's; the next look may find it well)
            _log.warning("looking for engines: %r", error)
            continue
        if found:
            shared.engines_back = True
            shared.tell()
