"""Calls on all ranks over their connections: whatever starts them, the rest is here."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from . import pickles
from .connection import Connection, Frame
from .errors import RankFailed, RanksLost, RankTraceback
from .life import Life
from .protocol import check_per_rank
from .serve import describe

#: A pickle above this is read in a thread.
_LARGE = 1 << 20
_PLAIN = (str, int, float, bool, type(None))
NOT_STARTED = "there are no ranks: start() makes them"


@dataclasses.dataclass(kw_only=True, slots=True)
class _Request:
    method: str
    args: tuple[Any, ...]
    per_rank: Sequence[Any] | None
    timeout_s: float | None
    sent: bool = False


class SocketRanks:
    """A `RankGroup` whose ranks dial back. `EmbeddedRanks` and `TorchrunRanks` start them."""

    def __init__(self, size: int, *, start_timeout_s: float, call_timeout_s: float | None) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; allowed: 1 rank or more")
        self._size = size
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._life: Life | None = None
        self._gone = NOT_STARTED
        self._turn = asyncio.Lock()

    # What differs between kinds of ranks ------------------------------------------------------

    async def _launch(self) -> list[Connection]:
        """Start all ranks; their connections by rank. Errors: `RanksLost`."""
        raise NotImplementedError

    async def _ended(self, rank: int | None) -> str:
        """See that all ranks end, in bounded time; what is known of how this one ended."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Free what `_launch` made, besides the ranks. Twice: no-op."""
        raise NotImplementedError

    #: For the call that runs when the ranks are closed, before they are ended in it.
    _goodbye_s = 0.0

    # What all have in common ------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    async def start(self) -> None:
        """Start all ranks and make their workers. After a loss: fresh ranks in place of all.

        Errors: `RanksLost` where they cannot be started, `RankFailed` where a factory raises.
        """
        await self._drop("start() was called anew")
        life = self._life = Life(await self._launch(), self._ended)
        try:
            async with self._turn:
                await self._exchange(life, b"M", [[]] * self._size, "start", self._start_timeout_s)
        except RankFailed:
            await self._drop("the factory of a worker raised")
            raise
        except BaseException:
            await self._drop("start() was interrupted")
            raise

    async def call(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The method's results by rank: see `RankGroup.call`.

        `timeout_s` counts from when the call has its turn. One that is cancelled before is never
        sent; after that it goes on, and so do the arguments on their way: leave them as they are.
        """
        check_per_rank(method, per_rank, self._size)
        if self._life is None:
            raise RanksLost(self._gone)
        limit_s = self._call_timeout_s if timeout_s is None else timeout_s
        request = _Request(method=method, args=args, per_rank=per_rank, timeout_s=limit_s)
        task = asyncio.ensure_future(self._in_turn(self._life, request))
        task.add_done_callback(_look_at_error)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not request.sent:
                task.cancel()
            raise

    async def close(self) -> None:
        """End all ranks. Twice: no-op."""
        if self._life is not None and not self._life.lost.done():
            await self._say_goodbye(self._life)
        await self._drop("close() was called")
        await self._release()

    async def _in_turn(self, life: Life, request: _Request) -> list[Any]:
        async with self._turn:
            if life.is_ending:
                raise await life.why()
            plain = request.per_rank is None and all(type(arg) in _PLAIN for arg in request.args)
            if plain:
                frames = _frames(request, self._size)
            else:  # what the arguments are like shows only when they are pickled
                frames = await asyncio.to_thread(_frames, request, self._size)
            request.sent = True
            return await self._exchange(life, b"C", frames, request.method, request.timeout_s)

    async def _exchange(
        self,
        life: Life,
        kind: bytes,
        frames: Sequence[Sequence[pickles.Bytes]],
        method: str,
        timeout_s: float | None,
    ) -> list[Any]:
        life.doing = method
        asked = [
            asyncio.ensure_future(connection.ask(kind, frame))
            for connection, frame in zip(life.connections, frames, strict=True)
        ]
        answered = asyncio.ensure_future(asyncio.wait(asked))
        try:
            waiting: set[asyncio.Future[Any]] = {answered, life.lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return await _results(method, [each.result() for each in asked])
            silent = ", ".join(str(rank) for rank, each in enumerate(asked) if not each.done())
            life.lose(f"{method}() was not answered in {timeout_s} s by rank {silent}")
            raise await life.why()
        finally:
            for each in (answered, *asked):
                each.cancel()
            await asyncio.wait({answered, *asked})
            life.doing = ""

    async def _say_goodbye(self, life: Life) -> None:
        """Let idle ranks end by themselves; those in a call have some time to come out of it."""
        try:
            await asyncio.wait_for(self._turn.acquire(), max(self._goodbye_s, 1e-3))
        except asyncio.TimeoutError:
            return
        try:
            for connection in life.connections:
                connection.on_end = None
            leaving = asyncio.gather(*(each.send(b"G", []) for each in life.connections))
            left = asyncio.gather(*(each.closed() for each in life.connections))
            for step in (leaving, left):
                await asyncio.wait([step], timeout=max(self._goodbye_s, 2.0))
        finally:
            self._turn.release()

    async def _drop(self, why: str) -> None:
        """End the ranks that there are; calls that run or wait fail with it."""
        life, self._life = self._life, None
        self._gone = NOT_STARTED
        if life is not None:
            life.lose(why)
            await asyncio.shield(life.lost)


def _frames(request: _Request, size: int) -> list[list[pickles.Bytes]]:
    """Makes each rank's parts: the number of common parts, the common ones, and its own."""
    common = pickles.dump((request.method, request.args))
    head = [len(common).to_bytes(4, "big"), *common]
    if request.per_rank is None:
        return [head] * size
    return [[*head, *pickles.dump(own)] for own in request.per_rank]


async def _results(method: str, frames: Sequence[Frame]) -> list[Any]:
    read = [
        await asyncio.to_thread(_read, rank, frame)
        if len(frame[1][0]) > _LARGE
        else _read(rank, frame)
        for rank, frame in enumerate(frames)
    ]
    errors = [error for _, error in read if error is not None]
    if errors:
        raise RankFailed(method, errors)
    return [result for result, _ in read]


def _read(rank: int, frame: Frame) -> tuple[Any, RankTraceback | None]:
    kind, parts = frame
    try:
        found = pickles.load(parts)
    except Exception as error:  # noqa: BLE001 (what was sent, a class's own code decides)
        return None, describe(rank, error)
    return (None, found) if kind == b"E" else (found, None)


def _look_at_error(task: asyncio.Task[list[Any]]) -> None:
    """Takes the error, so that asyncio does not report it if the caller was cancelled."""
    if not task.cancelled():
        task.exception()
