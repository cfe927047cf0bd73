"""Requests that an engine serves together: all draw tokens at one speed, which falls with them."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Callable

from megatron_idempotent.rollout.records import Sample

#: Tokens; a request that lacks less than this has all of them, as sums of seconds are rounded.
_NOTHING = 1e-6


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One request on its way. `begun` and `end` are places on the engine's count of tokens."""

    work: float
    """Tokens that it takes, its prompt's share included; infinite for one that never ends."""
    answer: asyncio.Future[Sample]
    order: int
    begun: float = math.inf
    end: float = math.inf

    def __lt__(self, other: Job) -> bool:
        return (self.end, self.order) < (other.end, other.order)

    @property
    def started(self) -> bool:
        """True once it has a slot."""
        return self.begun < math.inf


class Sharing:
    """Exact processor sharing in O(log requests) per request, whatever joins and leaves.

    All running requests draw at the same speed, so one count, the tokens that a request would have
    which is there from the beginning, says how far each of them is: a request is done when the
    count has grown by its work. Only the next end is a timer.

    Example: `sharing.add(job)`, and `sharing.speed_up(0.0)` to pause.
    """

    def __init__(
        self,
        slots: int,
        seconds_per_token: Callable[[int], float],
        done: Callable[[Job], None],
    ) -> None:
        """
        Args:
            slots: requests that run at once; more wait their turn.
            seconds_per_token: of each of so many requests that run.
            done: called with each job that has all its tokens.
        """
        self.tokens = 0.0
        """Drawn by all requests together."""
        self.busy_s = 0.0
        """Seconds in which tokens were drawn."""
        self._slots = slots
        self._seconds_per_token = seconds_per_token
        self._done = done
        self._count = 0.0
        self._factor = 1.0
        self._running: list[Job] = []
        self._live = 0
        self._left: set[Job] = set()
        self._waiting: deque[Job] = deque()
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> float:
        """Returns the count now."""
        self._advance()
        return self._count

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return self._live

    @property
    def taken(self) -> int:
        """Requests with and without one."""
        return self._live + len(self._waiting)

    def add(self, job: Job) -> None:
        """One more request; it runs if there is a slot."""
        self._advance()
        if self._live < self._slots:
            self._start(job)
            self._plan()
        else:
            self._waiting.append(job)

    def leave(self, job: Job) -> None:
        """A request that nobody waits for any more. One that is gone already: no-op."""
        self._advance()
        if not job.started:
            if job in self._waiting:
                self._waiting.remove(job)
        elif job.end > -math.inf and job not in self._left:
            self._left.add(job)
            self._live -= 1
            self._fill()
            self._plan()

    def speed_up(self, factor: float) -> None:
        """Sets the speed of all jobs, as a multiple of the usual one; 0 stands still."""
        self._advance()
        self._factor = factor
        self._plan()

    def take_all(self) -> list[Job]:
        """All requests, in the order in which they came; they are no longer this object's."""
        self._advance()
        jobs = [job for job in self._running if job not in self._left] + list(self._waiting)
        self._running, self._live = [], 0
        self._left.clear()
        self._waiting.clear()
        self._plan()
        return sorted(jobs, key=lambda job: job.order)

    def _start(self, job: Job) -> None:
        job.begun, job.end = self._count, self._count + job.work
        heapq.heappush(self._running, job)
        self._live += 1

    def _fill(self) -> None:
        while self._waiting and self._live < self._slots:
            self._start(self._waiting.popleft())

    def _speed(self) -> float:
        return self._factor / self._seconds_per_token(self._live) if self._live else 0.0

    def _advance(self) -> None:
        """Bring the count up to now."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        speed = self._speed()
        if passed > 0 and speed > 0:
            self._count += passed * speed
            self.tokens += passed * speed * self._live
            self.busy_s += passed

    def _plan(self) -> None:
        """Have the next end noticed. A timer that comes too early looks again."""
        while self._running and self._running[0] in self._left:
            self._left.discard(heapq.heappop(self._running))
        speed = self._speed()
        if not self._running or speed <= 0 or self._running[0].end == math.inf:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        when = self._at + max(self._running[0].end - self._count, 0.0) / speed
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        self._advance()
        while self._running and self._running[0].end <= self._count + _NOTHING:
            job = heapq.heappop(self._running)
            if job in self._left:
                self._left.discard(job)
                continue
            self._live -= 1
            job.end = -math.inf
            self._done(job)
        self._fill()
        self._plan()
