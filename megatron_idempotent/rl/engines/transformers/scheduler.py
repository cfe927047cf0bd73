"""Batches requests continuously: chooses those that are computed next, or none while paused."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from megatron_idempotent.rl.engines.protocol import (
    EngineError,
    FinishReason,
    PauseMode,
    Request,
    Sample,
)

from .batch import DecodeBatch, Turn, fold_seed


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class RequestSlot:
    """Holds a running request: its tokens so far, and the future that waits for all of them.

    Example: `RequestSlot(order=7, request=request, answer=loop.create_future())`.
    """

    order: int
    """The number of this request, in the order in which the engine has taken them."""
    request: Request
    answer: asyncio.Future[Sample]
    seed: int = dataclasses.field(init=False)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.request.seed
        self.seed = fold_seed(secrets.randbits(64) if given is None else given)

    def computed(self) -> tuple[int, ...]:
        """Return the tokens that the cache holds for it: all but the last one."""
        return (*self.request.prompt, *self.tokens)[:-1]

    def turn(self) -> Turn:
        """Return the inputs of the request's next token."""
        request = self.request
        return Turn(
            token=self.tokens[-1] if self.tokens else request.prompt[-1],
            place=request.continued + len(self.tokens),
            seed=self.seed,
            temperature=request.temperature,
        )

    def take(self, token: int, logprob: float, version: int) -> None:
        """Add a token, and answer the request if it was the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.stop_tokens:
            self.finish("stop")
        elif len(self.tokens) == self.request.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Answer with the tokens so far; a no-op if the caller has gone."""
        if not self.answer.done():
            self.answer.set_result(
                Sample(
                    request_id=self.request.id,
                    tokens=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                )
            )

    def fail(self, error: Exception) -> None:
        """Answer with an error; a no-op if the caller has gone."""
        if not self.answer.done():
            self.answer.set_exception(error)


T = TypeVar("T")


class Scheduler:
    """Takes requests and answers them, one forward of the model after the other.

    All state belongs to the event loop; forwards run in one thread of their own. Between two
    forwards rows join and leave, and a shut gate ends the work. The task that does all this lives
    only as long as there is something to compute.
    """

    def __init__(
        self,
        new_batch: Callable[[], DecodeBatch],
        *,
        name: str,
        version: int,
        max_running: int,
        prefill_tokens: int,
    ) -> None:
        """
        Args:
            new_batch: makes an empty batch of the model.
            name: the engine's name, for errors.
            version: the version that tokens are stamped with.
            max_running: the most rows; more requests wait for one.
            prefill_tokens: the most positions, padding included, that one forward computes for new
                rows.
        """
        self.version = version
        self._name = name
        self._new_batch = new_batch
        self._batch = new_batch()
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._gate: Literal["open", "draining", "shut"] = "open"
        self._taken = 0
        self._admitted = math.inf
        self._waiting: dict[int, RequestSlot] = {}
        self._joining: list[RequestSlot] = []
        self._rows: list[RequestSlot] = []
        self._task: asyncio.Task[None] | None = None
        self._quiet: list[asyncio.Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    @property
    def shut(self) -> bool:
        """True if no token is drawn, and none will be until `open()`."""
        return self._gate == "shut" and self._task is None

    @property
    def running(self) -> int:
        """The number of requests that were taken and not answered."""
        return len(self._waiting) + len(self._joining) + len(self._rows)

    async def answer(self, request: Request) -> Sample:
        """Sample one response; wait for the gate and for a row."""
        slot = RequestSlot(
            order=self._taken,
            request=request,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._taken += 1
        self._waiting[slot.order] = slot
        self._go()
        try:
            return await slot.answer
        finally:
            self._waiting.pop(slot.order, None)
            if slot.answer.cancelled() and self._task is None:
                self._sweep()  # else the task does it after its forward

    async def pause(self, mode: PauseMode) -> None:
        """Shut the gate; after the return no token is drawn. A cancelled call still shuts it.

        Errors: `EngineError` if the gate is opened before it was shut.
        """
        returned = mode == "abort" and not self.shut
        if mode != "wait":
            self._gate = "shut"
        elif self._gate == "open":
            self._gate, self._admitted = "draining", self._taken
            self._go()
        while self._task is not None and not self._opened():
            waiter = asyncio.get_running_loop().create_future()
            self._quiet.append(waiter)
            await waiter
        if self._opened():
            raise EngineError(f"{self._name} was resumed while it was about to pause; pause again")
        if returned:
            self.give_back()

    def open(self) -> None:
        """Draw tokens again."""
        self._gate, self._admitted = "open", math.inf
        self._tell()
        self._go()

    def give_back(self) -> None:
        """Answer all requests with what they have, and free the cache. The gate must be shut."""
        for slot in self._forget():
            slot.finish("abort")

    def recompute(self) -> None:
        """Make running requests compute their cache again. The gate must be shut."""
        running = {slot.order: slot for slot in self._rows}
        self._rows.clear()
        self._batch.clear()
        self._waiting = {**dict(sorted(running.items())), **self._waiting}

    def close(self) -> None:
        """End the thread. The gate must be shut."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _opened(self) -> bool:
        return self._gate == "open"

    def _go(self) -> None:
        if self._gate != "shut" and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    def _tell(self) -> None:
        for waiter in self._quiet:
            if not waiter.done():
                waiter.set_result(None)
        self._quiet.clear()

    async def _serve(self) -> None:
        try:
            while self._gate != "shut":
                self._sweep()
                sequences = self._next_sequences()
                if sequences:
                    await self._join(sequences)
                elif self._rows:
                    await self._draw()
                else:
                    break
            self._sweep()
        except BaseException as error:
            # The event loop ends, or this is a bug. A forward may still be writing to the batch.
            self._batch = self._new_batch()
            for slot in self._forget():
                slot.fail(self._error("its serving task ended", error))
            raise
        finally:
            self._task = None
            if self._gate == "draining":
                self._gate = "shut"
            self._tell()

    def _sweep(self) -> None:
        """Free the rows of requests that were answered or given up."""
        gone = [row for row, slot in enumerate(self._rows) if slot.answer.done()]
        if gone:
            self._rows = [self._rows[before] for before in self._batch.leave(gone)]

    def _next_sequences(self) -> dict[tuple[int, ...], list[RequestSlot]]:
        """Return the sequences to prefill in one forward, each once, with their requests."""
        room = self._max_running - len(self._rows)
        found: dict[tuple[int, ...], list[RequestSlot]] = {}
        for slot in itertools.islice(self._waiting.values(), max(room, 0)):
            if slot.order < self._admitted:
                found.setdefault(slot.computed(), []).append(slot)
        # Equal lengths beside each other: less padding, and a poor fit waits for the next forward.
        chosen: dict[tuple[int, ...], list[RequestSlot]] = {}
        for sequence in sorted(found, key=len):
            if chosen and len(sequence) * (len(chosen) + 1) > self._prefill_tokens:
                break
            chosen[sequence] = found[sequence]
        return chosen

    async def _join(self, sequences: dict[tuple[int, ...], list[RequestSlot]]) -> None:
        numbered = [(number, slot) for number, of in enumerate(sequences.values()) for slot in of]
        self._joining = [slot for _, slot in numbered]
        for slot in self._joining:
            del self._waiting[slot.order]
        which = [number for number, _ in numbered]
        if await self._compute(self._joining, self._batch.join, list(sequences), which) is not None:
            self._rows.extend(self._joining)
        self._joining = []

    async def _draw(self) -> None:
        rows = self._rows
        drawn = await self._compute(rows, self._batch.draw, [slot.turn() for slot in rows])
        if drawn is None:
            return
        for slot, token, logprob in zip(rows, *drawn, strict=True):
            if math.isnan(logprob):
                slot.fail(
                    EngineError(
                        f"{self._name}: the logits of request {slot.request.id!r} are not finite "
                        f"after {len(slot.tokens)} tokens, with weights of version {self.version}; "
                        "are these weights finite?"
                    )
                )
            else:
                slot.take(token, logprob, self.version)

    async def _compute(
        self, slots: Sequence[RequestSlot], method: Callable[..., T], *arguments: Any
    ) -> T | None:
        """Run a method of the batch in the thread; if it raises, fail its requests, return None."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{self._name}")
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, method, *arguments
            )
        except Exception as error:  # noqa: BLE001 - whatever the model raises is the requests'
            for slot in slots:
                slot.fail(self._error(f"a forward of {len(slots)} requests failed", error))
            return None

    def _forget(self) -> list[RequestSlot]:
        """Return all requests, and drop them from this object."""
        slots = [*self._rows, *self._joining, *self._waiting.values()]
        self._rows, self._joining, self._waiting = [], [], {}
        self._batch.clear()
        return slots

    def _error(self, what: str, cause: BaseException) -> EngineError:
        error = EngineError(f"{self._name}: {what}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
