"""The requests of a simulated engine, from when it takes them to their samples."""

from __future__ import annotations

import asyncio
import itertools
import math

from megatron_idempotent.rollout.records import FinishReason, Request, Sample

from .costs import EngineCosts
from .responses import Length, sample_of
from .sharing import Job, Sharing
from .stamps import Stamps, entries_of


class Serving:
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
        self._requests: dict[Job, tuple[Request, float]] = {}
        self._orders = itertools.count()
        self._held: list[Job] | None = None
        self._quiet = asyncio.Event()

    @property
    def taken(self) -> int:
        """Requests that were taken and not answered."""
        return len(self._requests)

    async def answer(self, request: Request) -> Sample:
        """The sample; a cancelled call frees what it held."""
        length = max(self._length(request), 1)
        whole, most = math.inf, math.inf
        if length < math.inf:
            whole = math.ceil(length / self._per_entry)
            most = max(min(whole - request.continued, request.max_tokens), 1)
        job = Job(
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

    def _take_all(self) -> list[Job]:
        jobs = [*self.sharing.take_all(), *(self._held or ())]
        if self._held is not None:
            self._held = []
        return jobs

    def _lose(self, job: Job) -> bool:
        """Counts the job's tokens as lost; returns whether it was still to be answered."""
        lost = self._requests.pop(job, None) is not None
        if lost:
            self.lost_tokens += self._drawn(job)
        return lost

    def _drawn(self, job: Job) -> float:
        """Tokens that a job has had, its prompt's share included."""
        return min(max(self.sharing.count - job.begun, 0.0), job.work)

    def _complete(self, job: Job) -> None:
        request, whole = self._requests[job]
        entries = entries_of(job.work - self._prompt, self._per_entry)
        self._answer(job, "stop" if request.continued + entries >= whole else "length", job.work)
        self._look_whether_quiet()

    def _answer(self, job: Job, reason: FinishReason, drawn: float) -> None:
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
