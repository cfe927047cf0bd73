"""Every call that a piece of Python makes, and an exception raised at one of them.

`sys.setprofile` sees each call as it starts, ours, Megatron's and torch's alike; what it raises is
raised there, as a keyboard interrupt would be. Nothing is picked by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dis import opname
from typing import Any

OURS = (
    "/megatron/",
    "/megatron_idempotent/",
    "/patches/",
    "/tests/",
    "/torch/distributed/fsdp/",
)


#: Caller's file, line, callee.
Site = tuple[str, int, str]


class Injected(BaseException):
    """Raised at a call site; not an `Exception`, because a keyboard interrupt is none either."""


class Failed(RuntimeError):
    """The same as an ordinary error."""


def sites(run: Callable[[], Any]) -> set[Site]:
    """Files from which calls count: Megatron's and this library's."""
    found: set[Site] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        site = _site(frame, event, argument)
        if site is not None:
            found.add(site)

    _profiled(profile, run)
    return found


def interrupt(run: Callable[[], Any], at: Site, kind: type[BaseException]) -> BaseException | None:
    """Run, raising as a call is first made there; what comes out of it, None if nothing does."""

    def profile(frame: Any, event: str, argument: Any) -> None:
        if _site(frame, event, argument) == at:
            sys.setprofile(None)
            raise kind(f"at {at}")

    try:
        _profiled(profile, run)
    except BaseException as raised:  # noqa: BLE001  it is what is asked for
        return raised
    return None


def _profiled(profile: Callable[..., None], run: Callable[[], Any]) -> None:
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)


def _site(frame: Any, event: str, argument: Any) -> Site | None:
    if event == "call":
        caller, callee = frame.f_back, frame.f_code.co_qualname
    elif event == "c_call" and not _spreads(frame):
        caller, callee = frame, getattr(argument, "__qualname__", repr(argument))
    else:
        return None
    if caller is None or caller.f_code.co_filename == __file__:
        return None
    name = caller.f_code.co_filename
    if not any(part in name for part in OURS):
        return None
    return name.rsplit("/", 2)[-2] + "/" + name.rsplit("/", 1)[-1], caller.f_lineno, callee


def _spreads(frame: Any) -> bool:
    """Return whether the call is `f(*list)`: CPython 3.12 frees the list twice if a profiler
    raises."""
    return opname[frame.f_code.co_code[frame.f_lasti]] == "CALL_FUNCTION_EX"
