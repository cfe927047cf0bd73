"""Calls methods on all ranks of a policy, and ends all ranks if one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from .frames import CALL, ERROR, MAKE, Bytes, Frame, dump, load
from .protocol import RankFailed, RanksLost, RankTraceback


class Link(Protocol):
    """Carries frames to one rank and its answers back, and notices its end."""

    on_end: Callable[[], None] | None
    """A function that is called once when the rank has ended, unless `shut` came before."""
    ended: str
    """The reason why the link ended; empty while it has not."""

    async def ask(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Send a frame, and return the answer; wait for ever if the rank ends before it.

        Do not cancel it if another `ask` is to follow.
        """

    async def leave(self) -> None:
        """Let an idle rank end by itself, for a bounded time."""

    def shut(self) -> None:
        """End the link without a call of `on_end`; the rank ends on it. Twice: no-op."""

    async def closed(self) -> None:
        """Wait until nothing of the link is left, after `shut`."""


class _Session:
    """Keeps the ranks of one start together: if one is lost, all are ended."""

    def __init__(
        self, links: Sequence[Link], end_ranks: Callable[[int | None], Awaitable[str]]
    ) -> None:
        """Take links by rank, and what ends all ranks and returns what is known of one's end.

        It takes a bounded time.
        """
        self.links = links
        self.turn = asyncio.Lock()
        self.doing = ""
        """The method that runs; empty while none does."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future of the reason, done once all ranks are ended."""
        self.ending: asyncio.Task[None] | None = None
        self._end_ranks = end_ranks
        for rank, link in enumerate(links):
            link.on_end = lambda rank=rank: self._gone(rank)
            if link.ended:
                self._gone(rank)

    def lose(self, why: str, rank: int | None = None) -> None:
        """End all ranks; the first reason is the one that is told."""
        if self.ending is None:
            for link in self.links:
                link.shut()
            self.ending = asyncio.get_running_loop().create_task(self._end(why, rank))

    async def why(self) -> RanksLost:
        """Return the error for a call, once all ranks are ended."""
        return RanksLost(await asyncio.shield(self.lost))

    async def call(
        self,
        method: str,
        args: tuple[Any, ...],
        per_rank: Sequence[Any] | None,
        timeout_s: float | None,
    ) -> list[Any]:
        """Call a method, for one who has the turn, and return the results by rank."""
        if self.ending is not None:
            raise await self.why()
        if per_rank is None and all(type(arg) in _PLAIN for arg in args):
            calls = self._calls((method, args), None)
        else:  # what the arguments are like shows only when they are pickled
            calls = await asyncio.to_thread(self._calls, (method, args), per_rank)
        return await self.exchange(CALL, calls, method, timeout_s)

    def called(self, done: asyncio.Future[list[Any]]) -> None:
        """Give the turn to the next, and look at an error whose caller may be cancelled."""
        self.turn.release()
        if not done.cancelled():
            done.exception()

    async def exchange(
        self,
        kind: bytes,
        calls: Sequence[Sequence[Bytes]],
        method: str,
        timeout_s: float | None,
    ) -> list[Any]:
        """Send a frame to each rank, and return what they answer."""
        self.doing = method
        asked = [
            asyncio.ensure_future(link.ask(kind, parts))
            for link, parts in zip(self.links, calls, strict=True)
        ]
        answered = asyncio.ensure_future(asyncio.wait(asked))
        try:
            waiting: set[asyncio.Future[Any]] = {answered, self.lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return await _results(method, [answer.result() for answer in asked])
            silent = ", ".join(str(rank) for rank, one in enumerate(asked) if not one.done())
            self.lose(f"{method}() was not answered in {timeout_s} s by rank {silent}")
            raise await self.why()
        finally:
            for task in (answered, *asked):
                task.cancel()
            await asyncio.wait({answered, *asked})
            self.doing = ""

    async def leave(self) -> None:
        """Let ranks end by themselves if none of them is in a call."""
        if self.turn.locked():
            return
        async with self.turn:
            for link in self.links:
                link.on_end = None
            await asyncio.gather(*(link.leave() for link in self.links))

    def _calls(self, common: Any, per_rank: Sequence[Any] | None) -> list[list[Bytes]]:
        """Make each rank's parts: the number of common parts, the common ones, and its own."""
        parts = dump(common)
        head = [len(parts).to_bytes(4, "big"), *parts]
        if per_rank is None:
            return [head] * len(self.links)
        return [[*head, *dump(own)] for own in per_rank]

    def _gone(self, rank: int) -> None:
        when = f"in {self.doing}()" if self.doing else "while idle"
        self.lose(f"rank {rank} was lost {when}: {self.links[rank].ended}", rank)

    async def _end(self, why: str, rank: int | None) -> None:
        try:
            known = await self._end_ranks(rank)
        except Exception as error:  # noqa: BLE001 (a pending call must get an answer)
            known = f"and they may not have ended: {error!r}"
        for link in self.links:
            await link.closed()
        known = f" ({known})" if known else ""
        self.lost.set_result(f"{why}{known}; all ranks were ended, and start() makes new ones")


#: A pickle above this is read in a thread.
_LARGE = 1 << 20
_PLAIN = (str, int, float, bool, type(None))


class Ranks:
    """Implements `RankGroup`; subclasses start and end the ranks, and make a link to each."""

    def __init__(self, size: int, *, start_timeout_s: float, call_timeout_s: float | None) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; allowed: 1 rank or more")
        self._size = size
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._session: _Session | None = None

    # What differs between kinds of ranks ------------------------------------------------------

    async def _launch(self) -> Sequence[Link]:
        """Start all ranks, and return their links by rank. Errors: `RanksLost`."""
        raise NotImplementedError

    async def _end(self, rank: int | None) -> str:
        """End all ranks in bounded time, and return what is known of this one's end."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Free what `_launch` made, besides the ranks. Twice: no-op."""
        raise NotImplementedError

    # What all have in common ------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    async def start(self) -> None:
        """Start all ranks and make their workers; after a loss, fresh ranks in place of all.

        Errors: `RanksLost` if they cannot be started, `RankFailed` if a factory raises.
        """
        await self._drop("start() was called again")
        session = self._session = _Session(await self._launch(), self._end)
        try:
            async with session.turn:
                nothing: list[list[Bytes]] = [[]] * self._size
                await session.exchange(MAKE, nothing, "start", self._start_timeout_s)
        except BaseException:
            await self._drop("start() did not come to its end")
            raise

    async def call(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Return the method's results by rank: see `RankGroup.call`.

        `timeout_s` counts from when the call has its turn. A call that is cancelled before its turn
        is never sent. After that it goes on: do not change its arguments, which may be on their
        way.
        """
        if per_rank is not None and len(per_rank) != self._size:
            raise ValueError(
                f"{method}() got per_rank of {len(per_rank)} and there are {self._size} ranks; "
                "give one argument for each"
            )
        session = self._session
        if session is None:
            raise RanksLost("there are no ranks: start() makes them")

        limit_s = self._call_timeout_s if timeout_s is None else timeout_s
        await session.turn.acquire()
        calling = asyncio.ensure_future(session.call(method, args, per_rank, limit_s))
        calling.add_done_callback(session.called)
        return await asyncio.shield(calling)

    async def close(self) -> None:
        """End all ranks. Twice: no-op."""
        if self._session is not None and not self._session.lost.done():
            await self._session.leave()
        await self._drop("close() was called")
        await self._release()

    async def _drop(self, why: str) -> None:
        """End the ranks, if there are any; calls that run or wait fail with this reason."""
        session, self._session = self._session, None
        if session is not None:
            session.lose(why)
            await asyncio.shield(session.lost)


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
        value = load(parts)
    except Exception as error:  # noqa: BLE001 (what was sent, a class's own code decides)
        return None, RankTraceback.of(rank, error)
    return (None, value) if kind == ERROR else (value, None)
