"""Runs work to its end although the caller that waits for it is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any


async def to_its_end(task: asyncio.Future[Any], limit_s: float | None = None) -> bool:
    """Wait until a task is done, even if the one who waits is cancelled, once or more often.

    Returns whether the caller was cancelled: it raises `CancelledError` after it has cleaned up.
    After the first cancellation it waits `limit_s` at most; a task that is not done then goes on.
    Example: `cancelled = await to_its_end(asyncio.ensure_future(policy.finish(step_id)), 300)`.
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
