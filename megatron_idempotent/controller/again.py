"""Calls that are made again where they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .shared import Shared

_T = TypeVar("_T")


async def tried(
    shared: Shared,
    what: str,
    call: Callable[[], Awaitable[_T]],
    *,
    final: tuple[type[Exception], ...] = (),
) -> _T:
    """Repeats an idempotent call within the attempts that a group has; returns its result.

    Failures are counted as retries of `what`. Errors: those of the last attempt; one of `final` at
    once, as trying again would not mend it.
    """
    settings, attempt = shared.settings, 0
    while True:
        try:
            return await call()
        except final:
            raise
        except Exception:
            shared.retries[what] += 1
            attempt += 1
            if attempt == settings.group_attempts:
                raise
        await asyncio.sleep(settings.retry_wait_s * 2 ** (attempt - 1))
