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


# Samples of the same length share them.
_tokens = functools.lru_cache(maxsize=4096)(lambda count: (TOKEN,) * count)
_logprobs = functools.lru_cache(maxsize=4096)(lambda count: (-1.0,) * count)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest:
    """Tracks one request that an engine has taken.

    `begun` and `end` are values of the engine's count, which grows by 1 for each token of a
    request.
    """

    request: Request
    whole: float
    """Entries of the whole response; infinite if it never ends."""
    work: float
    """Tokens to draw, with the prompt's time counted as tokens; infinite if it never ends."""
    answer: asyncio.Future[Sample]
    """Gets the sample, or the error."""
    order: int
    """A number that is higher the later the request came."""
    begun: float = math.inf
    """The count at which it got a slot; infinite before."""
    end: float = math.inf
    """The count at which it has all tokens; infinite before it began."""

    def __lt__(self, other: ServedRequest) -> bool:
        return (self.end, self.order) < (other.end, other.order)


class SimulatedServing:
    """Answers an engine's requests, which share its speed equally, exactly, in O(log requests).

    All running requests draw at the same speed, so one count serves all: the tokens that a request
    would have that ran from the beginning. A request is done when the count has grown by its work.
    Only the next end has a timer. Requests that come while it drains are held back.

    Example: `await serving.answer(request)`, and `serving.speed_up(0.0)` to pause.
    """

    def __init__(
        self, costs: EngineCosts, length: Length, tokens_per_entry: int, version: int
    ) -> None:
        self.tokens = 0.0
        """Tokens that all requests together have drawn."""
        self.busy_s = 0.0
        """Virtual seconds in which tokens were drawn."""
        self.lost_tokens = 0.0
        """Tokens that were drawn for requests that were never answered."""
        self._costs, self._length, self._per_entry = costs, length, tokens_per_entry
        self._requests: set[ServedRequest] = set()
        self._orders = itertools.count()
        self._count = self._at = 0.0
        self._factor = 1.0
        # A heap by their ends, of which those in `_left` are not waited for any more.
        self._running: list[ServedRequest] = []
        self._left: set[ServedRequest] = set()
        self._live = 0
        self._waiting: deque[ServedRequest] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._held: list[ServedRequest] | None = None
        self._quiet = asyncio.Event()
        self.restart(version)

    def restart(self, version: int) -> None:
        """Draw with weights of `version` from the beginning."""
        # The counts at which weights changed, and their versions.
        self._switches: list[tuple[float, int]] = [(-math.inf, version)]

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
            request=request,
            whole=whole,
            work=self._costs.prompt_tokens + most * self._per_entry,
            answer=asyncio.get_running_loop().create_future(),
            order=next(self._orders),
        )
        self._requests.add(job)
        if self._held is not None:
            self._held.append(job)
        else:
            self._add(job)
        try:
            return await job.answer
        finally:
            if job in self._requests:  # it was cancelled
                self._lose(job)
                if self._held is not None and job in self._held:
                    self._held.remove(job)
                elif job.begun == math.inf:
                    self._waiting.remove(job)
                else:
                    self._left.add(job)
                    self._live -= 1
                    self._plan()
                self._look_whether_quiet()

    async def drain(self) -> bool:
        """Wait until all requests are answered; hold back those that come until `undrain`.

        Returns False if `undrain` was called meanwhile.
        """
        if not (self._live or self._waiting):
            return True
        self._held = []
        self._quiet.clear()
        await self._quiet.wait()
        return self._held is not None

    def undrain(self) -> None:
        """Serve the requests that were held back, and hold back no more."""
        held, self._held = self._held, None
        self._quiet.set()
        for job in held or ():
            self._add(job)

    def speed_up(self, factor: float) -> None:
        """Set the speed of all requests to `factor` times the usual one; with 0 none draws."""
        self._advance()
        self._factor = factor
        self._plan()

    def switch(self, version: int) -> None:
        """Draw with weights of `version` from now on."""
        self._advance()
        self._switches.append((self._count, version))

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

    def _add(self, job: ServedRequest) -> None:
        """Take one more request; it runs at once if a slot is free, and else waits for one."""
        self._waiting.append(job)
        self._advance()
        self._plan()

    def _take_all(self) -> list[ServedRequest]:
        """Stop all requests, and return them in the order in which they came."""
        self._advance()
        self._running, self._live = [], 0
        self._left.clear()
        self._waiting.clear()
        if self._held is not None:
            self._held = []
        self._plan()
        return sorted(self._requests, key=lambda job: job.order)

    def _lose(self, job: ServedRequest) -> None:
        """Give up a request, and count its tokens as lost."""
        self._requests.remove(job)
        self._advance()
        self.lost_tokens += self._drawn(job)

    def _drawn(self, job: ServedRequest) -> float:
        """Return the tokens that a request has drawn, with its prompt's time counted as tokens."""
        return min(max(self._count - job.begun, 0.0), job.work)

    def _speed(self) -> float:
        return self._factor / self._costs.seconds_per_token(self._live) if self._live else 0.0

    def _advance(self) -> None:
        """Bring the count, `tokens` and `busy_s` up to now."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        speed = self._speed()
        if passed > 0 and speed > 0:
            self._count += passed * speed
            self.tokens += passed * speed * self._live
            self.busy_s += passed

    def _plan(self) -> None:
        """Fill free slots, and set a timer for the next end. One that rings too early plans again.

        The count has to be that of now.
        """
        while self._waiting and self._live < self._costs.slots:
            job = self._waiting.popleft()
            job.begun, job.end = self._count, self._count + job.work
            heapq.heappush(self._running, job)
            self._live += 1
        while self._running and self._running[0] in self._left:
            self._left.discard(heapq.heappop(self._running))
        speed, when = self._speed(), math.inf
        if self._running and speed > 0:
            when = self._at + max(self._running[0].end - self._count, 0.0) / speed
        if self._timer is not None and (when == math.inf or self._timer.when() > when):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and when < math.inf:
            self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """Answer the requests that have all their tokens."""
        self._timer = None
        self._advance()
        while self._running and self._running[0].end <= self._count + _NOTHING:
            job = heapq.heappop(self._running)
            if job in self._left:
                self._left.discard(job)
                continue
            self._live -= 1
            ends = job.request.continued + self._entries(job.work) >= job.whole
            self._answer(job, "stop" if ends else "length", job.work)
            self._look_whether_quiet()
        self._plan()

    def _answer(self, job: ServedRequest, reason: FinishReason, drawn: float) -> None:
        """Answer with the entries of the tokens that were drawn.

        An entry has the version that was served when its last token was drawn.
        """
        self._requests.remove(job)
        if job.answer.done():
            return
        entries = self._entries(drawn)
        versions: tuple[int, ...] = ()
        place = bisect.bisect_right(self._switches, (job.begun, math.inf)) - 1
        for at in range(place, len(self._switches) if entries else 0):
            before = entries
            if at + 1 < len(self._switches):
                before = min(self._entries(self._switches[at + 1][0] - job.begun), entries)
            versions += (self._switches[at][1],) * max(before - len(versions), 0)
            if len(versions) == entries:
                break
        job.answer.set_result(
            Sample(
                request_id=job.request.id,
                tokens=_tokens(entries),
                logprobs=_logprobs(entries),
                versions=versions,
                finish_reason=reason,
            )
        )

    def _entries(self, drawn: float) -> int:
        """Return the whole entries of the tokens that were drawn after a prompt.

        It allows for rounding in their sum.
        """
        return max(int((drawn - self._costs.prompt_tokens) / self._per_entry + 1e-6), 0)

    def _look_whether_quiet(self) -> None:
        if self._held is not None and not (self._live or self._waiting):
            self._quiet.set()
