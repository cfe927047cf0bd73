"""Provides an asyncio event loop with virtual time: instead of waiting, its clock jumps ahead.

It runs the same code as a real loop, provided that the code reads the time from the loop. Virtual
time takes only as long as the callbacks compute, and the same program always runs its callbacks in
the same order.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import linecache
import math
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

_ASYNCIO = Path(asyncio.__file__).parent


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return a text with the lines of code at which tasks wait, and how many wait at each, most
    tasks first.

    Example: `  3 tasks in Engine.generate (engine.py:80): await slot`.
    """
    places = Counter(map(_stands_at, tasks)).most_common(20)
    return "\n".join(f"  {count} tasks in {place}" for place, count in places) or "  none"


def _stands_at(task: asyncio.Task[Any]) -> str:
    """Return the innermost line of code at which a task waits, outside of asyncio itself."""
    inner: Any = task.get_coro()
    name, frame = getattr(inner, "__qualname__", repr(inner)), getattr(inner, "cr_frame", None)
    while (inner := getattr(inner, "cr_await", None)) is not None:
        within = getattr(inner, "cr_frame", None)
        if within is not None and Path(within.f_code.co_filename).parent != _ASYNCIO:
            name, frame = inner.__qualname__, within
    if frame is None:
        return str(name)
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{name} ({Path(file).name}:{line}): {linecache.getline(file, line).strip()}"


Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """Raised if all tasks wait, and no timer exists that could resume one; the message lists the
    tasks.
    """


class TooLong(RuntimeError):
    """Raised if the virtual clock has passed `limit_s`; the message lists the tasks that still
    wait.
    """


class _Timer(asyncio.TimerHandle):
    """A timer that sorts by time, then by the order in which timers were made.

    The order of asyncio's own timers with equal times is undefined.
    """

    __slots__ = ("_order",)
    _order: int

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        mine, others = self.when(), other.when()
        return mine < others or (mine == others and self._order < other._order)


class _Jumping(selectors.DefaultSelector):
    """A selector that does not wait: it calls `jump` with the timeout, to advance the virtual
    clock.
    """

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        # Poll the loop's own pipe, through which it learns of signals.
        events = super().select(0)
        if not events:
            self._jump(timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time: `time()` starts at 0 and is constant while callbacks run.

    A function passed to an executor runs at once, in the loop's thread, in zero virtual time; it
    must not wait for the loop. The loop does not wait for sockets and pipes. If all tasks wait and
    no timer is left, it raises `Deadlock`.

    Example: `VirtualLoop().run_until_complete(asyncio.sleep(3600))`.
    """

    def __init__(self, *, limit_s: float = math.inf) -> None:
        """Take `limit_s`, the virtual seconds after which `TooLong` is raised."""
        super().__init__(_Jumping(self._jump))
        self._now = 0.0
        self._limit_s = limit_s
        self._orders = itertools.count()
        self._measure()

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = _Timer(when, callback, args, self, context)
        timer._order = next(self._orders)
        heapq.heappush(self._timers, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 (raised at the caller, as by a real executor)
            done.set_exception(error)
        return done

    @property
    def _timers(self) -> list[asyncio.TimerHandle]:
        return self._scheduled  # type: ignore[attr-defined, no-any-return]

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(
                f"at {self._now:g} s nothing can happen any more, and these tasks still wait:\n"
                f"{describe_tasks(asyncio.all_tasks(self))}"
            )
        # Set the timer's own time: adding differences would accumulate rounding errors.
        self._now = max(self._now, self._timers[0].when())
        if self._now > self._limit_s:
            raise TooLong(
                f"the virtual clock has passed {self._limit_s:g} s, at {self._now:g} s; raise "
                "limit_s, or see what these tasks wait for:\n"
                f"{describe_tasks(asyncio.all_tasks(self))}"
            )
        self._measure()

    def _measure(self) -> None:
        """Set the loop's clock resolution to one ulp of the virtual time: asyncio runs timers early
        by up to the resolution, and must run them exactly on time.
        """
        self._clock_resolution = math.ulp(self._now)


def run(main: Coroutine[Any, Any, Result], *, limit_s: float = math.inf) -> Result:
    """Run a coroutine like `asyncio.run`, on a virtual clock that starts at 0; return its result.

    At the end it cancels the remaining tasks, and closes asynchronous generators.

    Raises:
        Deadlock: all tasks wait, and no timer is left.
        TooLong: `main` is not done after `limit_s` virtual seconds.
        Exception: the error of `main`.

    Example: `run(asyncio.sleep(3600))`.
    """
    loop = VirtualLoop(limit_s=limit_s)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        try:
            loop._limit_s = math.inf
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            for task in left:
                if not task.cancelled() and (error := task.exception()) is not None:
                    message = "unhandled exception while the loop was ended"
                    context = {"message": message, "exception": error, "task": task}
                    loop.call_exception_handler(context)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
