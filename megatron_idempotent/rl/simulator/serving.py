"""Answers the requests of a simulated engine, which share its speed, with simulated samples."""

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

from megatron_idempotent.rl.engines.protocol import FinishReason, Request, Sample
from megatron_idempotent.settings import Field, settings

from .latency import LogNormal, uniform

#: Tokens; a request that lacks less than this has all of them, as sums of seconds are rounded.
_NOTHING = 1e-6


@dataclasses.dataclass(slots=True, eq=False)
class ServedRequest:
    """Tracks one request that an engine has taken.

    `begun` and `end` are values of `Sharing.count`, which grows by 1 for each token of a request.
    """

    work: float
    """Tokens to draw, with the prompt's time counted as tokens; infinite if it never ends."""
    answer: asyncio.Future[Sample]
    """Gets the sample, or the error."""
    order: int
    """A number that is higher the later the request came."""
    begun: float = math.inf
    """The count at which it got a slot; infinite before."""
    end: float = math.inf
    """The count at which it has all tokens; infinite before it began, minus infinity afterwards."""

    def __lt__(self, other: ServedRequest) -> bool:
        return (self.end, self.order) < (other.end, other.order)

    @property
    def started(self) -> bool:
        """True once it has had a slot."""
        return self.begun < math.inf


class Sharing:
    """Shares an engine's speed equally among its requests, exactly, in O(log requests) for each.

    All running requests draw at the same speed, so one count serves all: the tokens that a request
    would have that ran from the beginning. A request is done when the count has grown by its work.
    Only the next end has a timer.

    Example: `sharing.add(job)`, and `sharing.speed_up(0.0)` to pause.
    """

    def __init__(
        self,
        slots: int,
        seconds_per_token: Callable[[float], float],
        done: Callable[[ServedRequest], None],
    ) -> None:
        """
        Args:
            slots: the most requests that run at once; more wait their turn.
            seconds_per_token: returns each request's seconds per token, given how many run.
            done: is called with each request that has all its tokens.
        """
        self.tokens = 0.0
        """Tokens that all requests together have drawn."""
        self.busy_s = 0.0
        """Virtual seconds in which tokens were drawn."""
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
        """The tokens that a request would have now that ran from the beginning."""
        self._advance()
        return self._count

    @property
    def taken(self) -> int:
        """The number of requests that run or wait for a slot."""
        return self._live + len(self._waiting)

    def add(self, job: ServedRequest) -> None:
        """Take one more request; it runs at once if a slot is free, and else waits for one."""
        self._advance()
        if self._live < self._slots:
            self._start(job)
            self._plan()
        else:
            self._waiting.append(job)

    def leave(self, job: ServedRequest) -> None:
        """Drop a request that nobody waits for any more; do nothing if it has left already."""
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
        """Set the speed of all requests to `factor` times the usual one; with 0 none draws."""
        self._advance()
        self._factor = factor
        self._plan()

    def take_all(self) -> list[ServedRequest]:
        """Remove all requests, and return them in the order in which they came."""
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
        """Bring `count`, `tokens` and `busy_s` up to now."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        speed = self._speed()
        if passed > 0 and speed > 0:
            self._count += passed * speed
            self.tokens += passed * speed * self._live
            self.busy_s += passed

    def _plan(self) -> None:
        """Set a timer for the next request that ends. One that rings too early plans again."""
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
    """Sets the virtual time that an engine's work takes.

    A decode step of a batch of n requests takes `step_s + n * request_s` seconds and gives each
    request one token. So small batches are memory-bound, and an engine never draws more than
    1 / `request_s` tokens a second.
    """

    slots: int = Field(default=64, ge=1)
    """Requests that run at once; more wait in the engine."""
    step_s: float = Field(default=0.02, ge=0)
    """Seconds of a decode step, however many requests it serves."""
    request_s: float = Field(default=0.0002, ge=0)
    """Seconds that each request adds to a decode step."""
    prompt_tokens: float = Field(default=0.0, ge=0)
    """Time before a response's first token, or before it goes on after an abort, in tokens."""
    bucket_s: float = Field(default=0.5, ge=0)
    """Seconds to take one bucket of weights; the engine serves meanwhile."""
    pause_s: float = Field(default=0.02, ge=0)
    """Seconds until a pause holds."""
    commit_s: float = Field(default=0.5, ge=0)
    """Seconds to switch to staged weights."""
    resume_s: float = Field(default=0.01, ge=0)
    """Seconds until the engine draws again after a pause."""

    def __post_init__(self) -> None:
        if self.step_s + self.request_s <= 0:
            raise ValueError(
                f"engine.step_s is {self.step_s:g} and engine.request_s {self.request_s:g}; "
                "allowed: a sum above 0"
            )

    def seconds_per_token(self, running: float) -> float:
        """Return the seconds per token of each request while `running` of them run, or in mean."""
        return self.step_s + running * self.request_s

    def tokens_per_s(self, running: float) -> float:
        """Return the most tokens per second of an engine with a mean of `running` requests.

        It is concave in their number. Below one request per engine some engines have none, so it is
        linear there.
        """
        running = min(running, self.slots)
        return min(running, 1.0) * max(running, 1.0) / self.seconds_per_token(max(running, 1.0))


_SOME = LogNormal(median=500, p99=4000)
#: The token of which simulated responses consist.
TOKEN = 7

Length = Callable[[Request], float]
"""Returns the tokens of the whole response to a request, including the part that it continues."""


def some_length(request: Request) -> float:
    """Return a length around 500 tokens with a long tail, drawn by the request's seed or its id."""
    seed = request.seed if request.seed is not None else zlib.crc32(request.id.encode())
    return _SOME.quantile(uniform(seed))


@functools.lru_cache(maxsize=4096)
def _tokens(count: int) -> tuple[int, ...]:
    return (TOKEN,) * count


@functools.lru_cache(maxsize=4096)
def _logprobs(count: int) -> tuple[float, ...]:
    return (-1.0,) * count


class Stamps:
    """Remembers at which counts of tokens an engine got new weights, to tell entries' versions.

    Example: `Stamps(0).versions(begun=0.0, prompt=0.0, entries=3, per_entry=1)`.
    """

    def __init__(self, version: int) -> None:
        self._switches = [-math.inf]
        self._versions = [version]

    def switch(self, version: int, *, at: float) -> None:
        """Note that tokens after the count `at` are drawn with weights of `version`."""
        self._switches.append(at)
        self._versions.append(version)

    def versions(
        self, *, begun: float, prompt: float, entries: int, per_entry: int
    ) -> tuple[int, ...]:
        """Return the version of each entry of a response, [entries].

        An entry has the version that was served when its last token was drawn.

        Args:
            begun: the count at which the prompt began to be computed.
            prompt: the prompt's time in tokens.
            entries: the number of entries in the response.
            per_entry: the tokens that each entry stands for.
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
    """Return the number of whole entries in `tokens`, allowing for rounding in their sum."""
    return max(int(tokens / per_entry + 1e-6), 0)


class SimulatedServing:
    """Answers requests in simulated time, and holds back those that come while it drains.

    Example: `await serving.answer(request)`, and `serving.sharing.speed_up(0.0)` to pause.
    """

    def __init__(self, costs: EngineCosts, length: Length, tokens_per_entry: int) -> None:
        self.sharing = Sharing(costs.slots, costs.seconds_per_token, self._complete)
        self.stamps = Stamps(0)
        self.lost_tokens = 0.0
        """Tokens that were drawn for requests that were never answered."""
        self._prompt = costs.prompt_tokens
        self._length = length
        self._per_entry = tokens_per_entry
        # Each with the entries of its whole response.
        self._requests: dict[ServedRequest, tuple[Request, float]] = {}
        self._orders = itertools.count()
        self._held: list[ServedRequest] | None = None
        self._quiet = asyncio.Event()

    @property
    def taken(self) -> int:
        """The number of requests that were taken and are not answered yet."""
        return len(self._requests)

    async def answer(self, request: Request) -> Sample:
        """Answer a request in the time that it takes; a cancelled call frees its slot.

        Errors: what the length function raises, and what is given to `fail`.
        """
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
        """Wait until all requests are answered; hold back those that come until `undrain`."""
        if self.sharing.taken:
            self._held = []
            self._quiet.clear()
            await self._quiet.wait()

    @property
    def draining(self) -> bool:
        """True while requests that come are held back."""
        return self._held is not None

    def undrain(self) -> None:
        """Serve the requests that were held back, and hold back no more."""
        held, self._held = self._held, None
        self._quiet.set()
        for job in held or ():
            self.sharing.add(job)

    def give_back(self) -> None:
        """Answer all requests with the tokens that they have, as aborted ones."""
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
        """Count the tokens of an unanswered request as lost; return whether it was unanswered."""
        lost = self._requests.pop(job, None) is not None
        if lost:
            self.lost_tokens += self._drawn(job)
        return lost

    def _drawn(self, job: ServedRequest) -> float:
        """Return the tokens that a request has drawn, with its prompt's time counted as tokens."""
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
        sample = Sample(
            request_id=request.id,
            # Samples of the same length share them.
            tokens=_tokens(entries),
            logprobs=_logprobs(entries),
            versions=versions,
            finish_reason=reason,
        )
        job.answer.set_result(sample)

    def _look_whether_quiet(self) -> None:
        if self._held is not None and not self.sharing.taken:
            self._quiet.set()
