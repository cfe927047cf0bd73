"""Stops the timers that a call which raised has left running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stopping(timers: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`; where it raises, stop the timers that it started and did not stop.

    What they had measured before stays: several iterations may add up to one line of the log.
    """
    known = getattr(timers, "_timers", None)
    if known is None:  # no timers, or a framework's own
        return original(*args, **kwargs)
    before = {name for name, timer in known.items() if timer._started}
    try:
        return original(*args, **kwargs)
    except BaseException:
        for name, timer in known.items():
            if timer._started and name not in before:
                timer._started = False
        raise
