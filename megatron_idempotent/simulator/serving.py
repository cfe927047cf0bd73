"""The requests that a simulated engine serves: their shared speed, their costs, their samples."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable

from megatron_idempotent.engines.protocol import FinishReason, Request, Sample
from megatron_idempotent.settings import Field, settings

from .latency import LogNormal, uniform

#: Tokens; a request that lacks less than this has all of them, as sums of seconds are rounded.
_NOTHING = 1e-6


@dataclasses.dataclass(slots=True, eq=False)
class ServedRequest:
    """One request on its way. `begun` and `end` are places on the engine's count of tokens."""

    work: float
    """Tokens that it takes, its prompt's share included; infinite for one that never ends."""
    answer: asyncio.Future[Sample]
    order: int
    begun: float = math.inf
    end: float = math.inf

    def __lt__(self, other: ServedRequest) -> bool:
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
        done: Callable[[ServedRequest], None],
    ) -> None:
        """
        Args:
            slots: requests that run at once; more wait their turn.
            seconds_per_token: maps the number of running requests to each one's.
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
        self._running: list[ServedRequest] = []
        self._live = 0
        self._left: set[ServedRequest] = set()
        self._waiting: deque[ServedRequest] = deque()
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

    def add(self, job: ServedRequest) -> None:
        """Take one more request; it runs if there is a slot."""
        self._advance()
        if self._live < self._slots:
            self._start(job)
            self._plan()
        else:
            self._waiting.append(job)

    def leave(self, job: ServedRequest) -> None:
        """Drop a request that nobody waits for any more. One that is gone already: no-op."""
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

    def take_all(self) -> list[ServedRequest]:
        """Return all requests, in the order in which they came.

        They are no longer this object's.
        """
        self._advance()
        jobs = [job for job in self._running if job not in self._left] + list(self._waiting)
        self._running, self._live = [], 0
        self._left.clear()
        self._waiting.clear()
        self._plan()
        return sorted(jobs, key=lambda job: job.order)

    def _start(self, job: ServedRequest) -> None:
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


@settings(ValueError, "engine.")
class EngineCosts:
    """The cost of an engine's work.

    A decode step of a batch of n requests takes `step_s + n * request_s` and brings each of them
    one token: memory-bound for small batches, and never more than 1 / request_s tokens a second.
    """

    slots: int = Field(default=64, ge=1)
    """Requests that run at once; more wait in the engine."""
    step_s: float = Field(default=0.02, ge=0)
    request_s: float = Field(default=0.0002, ge=0)
    prompt_tokens: float = Field(default=0.0, ge=0)
    """Tokens' worth of time before the first token of a response, or of what is left of it."""
    bucket_s: float = Field(default=0.5, ge=0)
    """Seconds to take one bucket of weights; the engine serves meanwhile."""
    pause_s: float = Field(default=0.02, ge=0)
    commit_s: float = Field(default=0.5, ge=0)
    resume_s: float = Field(default=0.01, ge=0)

    def __post_init__(self) -> None:
        if self.step_s + self.request_s <= 0:
            raise ValueError(
                f"engine.step_s is {self.step_s:g} and engine.request_s {self.request_s:g}; "
                "allowed: steps that take time"
            )

    def seconds_per_token(self, running: int) -> float:
        """Returns the seconds per token of each of `running` requests."""
        return self.step_s + running * self.request_s

    def tokens_per_s(self, running: float) -> float:
        """Returns the most tokens per second of all `running` requests; concave in their number.

        Below one request per engine some engines have none, so it is linear there.
        """
        running = min(running, self.slots)
        return min(running, 1.0) * max(running, 1.0) / self.seconds_per_token_of(max(running, 1.0))

    def seconds_per_token_of(self, running: float) -> float:
        """Returns the mean seconds per token of each of `running` requests."""
        return self.step_s + running * self.request_s


_SOME = LogNormal(median=500, p99=4000)
#: What a simulated response is made of.
TOKEN = 7

Length = Callable[[Request], float]
"""Tokens of the whole response to a request, the part that it continues included."""


def sample_of(request: Request, versions: tuple[int, ...], reason: FinishReason) -> Sample:
    """Return a sample with an entry for each version.

    Its tokens and log-probs are shared, not copied.
    """
    return Sample(
        request_id=request.id,
        tokens=_tokens(len(versions)),
        logprobs=_logprobs(len(versions)),
        versions=versions,
        finish_reason=reason,
    )


def some_length(request: Request) -> float:
    """Around 500 tokens with a long tail, by the request's seed, or its name where it has none."""
    seed = request.seed if request.seed is not None else zlib.crc32(request.id.encode())
    return _SOME.quantile(uniform(seed))


@functools.lru_cache(maxsize=4096)
def _tokens(count: int) -> tuple[int, ...]:
    return (TOKEN,) * count


@functools.lru_cache(maxsize=4096)
def _logprobs(count: int) -> tuple[float, ...]:
    return (-1.0,) * count


class Stamps:
    """The places, on an engine's count of tokens, at which it was given new weights.

    Example: `Stamps(0).versions(begun=0.0, prompt=0.0, entries=3, per_entry=1)`.
    """

    def __init__(self, version: int) -> None:
        self._switches = [-math.inf]
        self._versions = [version]

    def switch(self, version: int, *, at: float) -> None:
        """Stamps the tokens after that place with the version."""
        self._switches.append(at)
        self._versions.append(version)

    def versions(
        self, *, begun: float, prompt: float, entries: int, per_entry: int
    ) -> tuple[int, ...]:
        """Versions of the entries of a response, [entries].

        An entry has the version that was served when its last token was drawn.

        Args:
            begun: place at which its prompt began to be computed.
            prompt: length of the prompt on the count.
            entries: of the response.
            per_entry: tokens that each stands for.
        """
        found: tuple[int, ...] = ()
        place = bisect.bisect_right(self._switches, begun) - 1
        for at in range(place, len(self._switches)):
            before = entries
            if at + 1 < len(self._switches):
                drawn = self._switches[at + 1] - begun - prompt
                before = min(entries_of(drawn, per_entry), entries)
            found += (self._versions[at],) * max(before - len(found), 0)
            if len(found) == entries:
                break
        return found


def entries_of(tokens: float, per_entry: int) -> int:
    """Return the number of whole entries in `tokens`, a sum of rounded numbers."""
    return max(int(tokens / per_entry + 1e-6), 0)


class SimulatedServing:
    """Answers requests in the time that it takes, and keeps those that come while it drains.

    Example: `await serving.answer(request)`, and `serving.speed_up(0.0)` to pause.
    """

    def __init__(self, costs: EngineCosts, length: Length, tokens_per_entry: int) -> None:
        self.sharing = Sharing(costs.slots, costs.seconds_per_token, self._complete)
        self.stamps = Stamps(0)
        self.lost_tokens = 0.0
        """Drawn for requests that were never answered."""
        self._prompt = costs.prompt_tokens
        self._length = length
        self._per_entry = tokens_per_entry
        # And the entries of the whole response.
        self._requests: dict[ServedRequest, tuple[Request, float]] = {}
        self._orders = itertools.count()
        self._held: list[ServedRequest] | None = None
        self._quiet = asyncio.Event()

    @property
    def taken(self) -> int:
        """Requests that were taken and not answered."""
        return len(self._requests)

    async def answer(self, request: Request) -> Sample:
        """Return the sample; a cancelled call frees what it held."""
        length = max(self._length(request), 1)
        whole, most = math.inf, math.inf
        if length < math.inf:
            whole = math.ceil(length / self._per_entry)
            most = max(min(whole - request.continued, request.max_tokens), 1)
        job = ServedRequest(
            work=self._prompt + most * self._per_entry,
            answer=asyncio.get_running_loop().create_future(),
            order=next(self._orders),
        )
        self._requests[job] = request, whole
        if self._held is not None:
            self._held.append(job)
        else:
            self.sharing.add(job)
        try:
            return await job.answer
        finally:
            if self._lose(job):
                if self._held is not None and job in self._held:
                    self._held.remove(job)
                self.sharing.leave(job)
                self._look_whether_quiet()

    async def drain(self) -> None:
        """Wait until all requests are answered; those that come meanwhile wait for `undrain`."""
        if self.sharing.taken:
            self._held = []
            self._quiet.clear()
            await self._quiet.wait()

    @property
    def draining(self) -> bool:
        """True if requests that come are held back."""
        return self._held is not None

    def undrain(self) -> None:
        """Let in what was held back."""
        held, self._held = self._held, None
        self._quiet.set()
        for job in held or ():
            self.sharing.add(job)

    def give_back(self) -> None:
        """Answer all requests with what they have; those that are held back have nothing."""
        for job in self._take_all():
            self._answer(job, "abort", self._drawn(job))

    def fail(self, error: Exception) -> None:
        """Answer all requests with an error."""
        for job in self._take_all():
            self._lose(job)
            if not job.answer.done():
                job.answer.set_exception(error)
        self._quiet.set()

    def _take_all(self) -> list[ServedRequest]:
        jobs = [*self.sharing.take_all(), *(self._held or ())]
        if self._held is not None:
            self._held = []
        return jobs

    def _lose(self, job: ServedRequest) -> bool:
        """Counts the job's tokens as lost; returns whether it was still to be answered."""
        lost = self._requests.pop(job, None) is not None
        if lost:
            self.lost_tokens += self._drawn(job)
        return lost

    def _drawn(self, job: ServedRequest) -> float:
        """Tokens that a job has had, its prompt's share included."""
        return min(max(self.sharing.count - job.begun, 0.0), job.work)

    def _complete(self, job: ServedRequest) -> None:
        request, whole = self._requests[job]
        entries = entries_of(job.work - self._prompt, self._per_entry)
        self._answer(job, "stop" if request.continued + entries >= whole else "length", job.work)
        self._look_whether_quiet()

    def _answer(self, job: ServedRequest, reason: FinishReason, drawn: float) -> None:
        request, _ = self._requests.pop(job, (None, 0))
        if request is None or job.answer.done():
            return
        entries = entries_of(drawn - self._prompt, self._per_entry)
        versions = self.stamps.versions(
            begun=job.begun, prompt=self._prompt, entries=entries, per_entry=self._per_entry
        )
        job.answer.set_result(sample_of(request, versions, reason))

    def _look_whether_quiet(self) -> None:
        if self._held is not None and not self.sharing.taken:
            self._quiet.set()
