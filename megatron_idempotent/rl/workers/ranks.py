"""Calls methods on all ranks of a policy, and ends all ranks if one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from .frames import CALL, ERROR, MAKE, Bytes, Frame, dump, load
from .protocol import RankFailed, RanksLost, RankTraceback


class Link(Protocol):
    """The protocol of a controller's connection to one rank: sends frames, receives replies, and
    notices the rank's end.
    """

    on_end: Callable[[], None] | None
    """Called once when the rank has ended, unless `shut` was called before."""
    ended: str
    """The reason why the link ended; empty while it is open."""

    async def ask(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Send a frame to the rank, and return the rank's reply.

        If the rank ends before the reply, the call stays pending until it is cancelled. After a
        cancelled call, the link must not be used again.
        """

    async def leave(self) -> None:
        """Tell an idle rank to end, and wait a bounded time until it has ended by itself."""

    def shut(self) -> None:
        """End the connection, and so the rank, without calling `on_end`. A second call is a
        no-op.
        """

    async def closed(self) -> None:
        """Wait, after `shut`, until all of the connection's resources are free."""


class _Session:
    """The ranks that one call of `start` launched; if one rank is lost, all ranks are ended."""

    def __init__(
        self, links: Sequence[Link], end_ranks: Callable[[int | None], Awaitable[str]]
    ) -> None:
        """Watch the links to all ranks, given by rank; if one link ends, call `end_ranks`, which
        ends all ranks.

        `end_ranks` takes a rank or None, and returns how that rank ended, in bounded time.
        """
        self.links = links
        self.turn = asyncio.Lock()
        self.doing = ""
        """The name of the running method; empty if no method is running."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future of the reason for the loss, done once all ranks have ended."""
        self.ending: asyncio.Task[None] | None = None
        self._end_ranks = end_ranks
        for rank, link in enumerate(links):
            link.on_end = lambda rank=rank: self._on_lost(rank)
            if link.ended:
                self._on_lost(rank)

    def lose(self, reason: str, rank: int | None = None) -> None:
        """End all ranks for a `reason`, such as the death of a rank. Running and later calls then
        raise `RanksLost` with the first reason given. `rank` is the rank that died, or None if no
        single rank did.
        """
        if self.ending is None:
            for link in self.links:
                link.shut()
            self.ending = asyncio.get_running_loop().create_task(self._end(reason, rank))

    async def loss(self) -> RanksLost:
        """Wait until `lose` has ended all ranks, and return the `RanksLost` error for the caller to
        raise.
        """
        return RanksLost(await asyncio.shield(self.lost))

    async def call(
        self,
        method: str,
        args: tuple[Any, ...],
        per_rank: Sequence[Any] | None,
        timeout_s: float | None,
    ) -> list[Any]:
        """Call a worker's method on all ranks, and return the results by rank. The caller must hold
        the lock `turn`, so that only one call runs at a time.
        """
        if self.ending is not None:
            raise await self.loss()
        if per_rank is None and all(type(arg) in _PLAIN for arg in args):
            calls = self._calls((method, args), None)
        else:  # the arguments may be large
            calls = await asyncio.to_thread(self._calls, (method, args), per_rank)
        return await self.exchange(CALL, calls, method, timeout_s)

    def called(self, finished_call: asyncio.Future[list[Any]]) -> None:
        """Release the lock `turn` after a call, and retrieve the call's error, so that asyncio does
        not log the error as never retrieved.
        """
        self.turn.release()
        if not finished_call.cancelled():
            finished_call.exception()

    async def exchange(
        self,
        kind: bytes,
        calls: Sequence[Sequence[Bytes]],
        method: str,
        timeout_s: float | None,
    ) -> list[Any]:
        """Send each rank its frame of the kind `kind`, wait for all replies, and return the results
        by rank. `method` is the called method's name, for errors.
        """
        self.doing = method
        replies = [
            asyncio.ensure_future(link.ask(kind, parts))
            for link, parts in zip(self.links, calls, strict=True)
        ]
        answered = asyncio.ensure_future(asyncio.wait(replies))
        try:
            waiting: set[asyncio.Future[Any]] = {answered, self.lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return await _results(method, [answer.result() for answer in replies])
            silent = ", ".join(str(rank) for rank, reply in enumerate(replies) if not reply.done())
            self.lose(f"{method}() was not answered in {timeout_s} s by rank {silent}")
            raise await self.loss()
        finally:
            for task in (answered, *replies):
                task.cancel()
            await asyncio.wait({answered, *replies})
            self.doing = ""

    async def leave(self) -> None:
        """Let idle ranks end by themselves; do nothing while a call is running."""
        if self.turn.locked():
            return
        async with self.turn:
            for link in self.links:
                link.on_end = None
            await asyncio.gather(*(link.leave() for link in self.links))

    def _calls(self, common: Any, per_rank: Sequence[Any] | None) -> list[list[Bytes]]:
        """Return for each rank the parts (byte buffers) of its CALL frame.

        First comes the number of parts of `common`, which is the called method's name and the
        arguments that are the same on all ranks. Then come the parts of `common`, and then, if
        `per_rank` is given, the parts of the rank's own argument.
        """
        parts = dump(common)
        head = [len(parts).to_bytes(4, "big"), *parts]
        if per_rank is None:
            return [head] * len(self.links)
        return [[*head, *dump(argument)] for argument in per_rank]

    def _on_lost(self, rank: int) -> None:
        when = f"in {self.doing}()" if self.doing else "while idle"
        self.lose(f"rank {rank} was lost {when}: {self.links[rank].ended}", rank)

    async def _end(self, reason: str, rank: int | None) -> None:
        try:
            fact = await self._end_ranks(rank)
        except Exception as error:  # noqa: BLE001 (a pending call must still end)
            fact = f"and they may not have ended: {error!r}"
        for link in self.links:
            await link.closed()
        fact = f" ({fact})" if fact else ""
        self.lost.set_result(f"{reason}{fact}; all ranks were ended, and start() makes new ones")


#: A pickle above this is read in a thread.
_LARGE = 1 << 20
_PLAIN = (str, int, float, bool, type(None))


class Ranks:
    """A base class that implements `RankGroup`; subclasses start and end ranks, and make a link to
    each.
    """

    def __init__(self, size: int, *, start_timeout_s: float, call_timeout_s: float | None) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; allowed: 1 rank or more")
        self._size = size
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._session: _Session | None = None

    # What differs between kinds of ranks ------------------------------------------------------

    async def _launch(self) -> Sequence[Link]:
        """Start the processes or actors of all ranks, and return a link to each, by rank.

        Raises:
            RanksLost: the ranks cannot be started.
        """
        raise NotImplementedError

    async def _end(self, rank: int | None) -> str:
        """End all ranks in bounded time. Return a text that says how `rank` ended, or "" if
        unknown.
        """
        raise NotImplementedError

    async def _release(self) -> None:
        """Free what `_launch` keeps for a later start, such as a placement group. A second call is
        a no-op.
        """
        raise NotImplementedError

    # What all have in common ------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    async def start(self) -> None:
        """Start all ranks and construct their workers; ranks of an earlier start are ended first.

        Raises:
            RanksLost: the ranks cannot be started.
            RankFailed: a factory raised.
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
        """Call a method of the worker on all ranks; return the results by rank. See
        `RankGroup.call`.

        `timeout_s` counts from the time at which earlier calls have finished. A call that is
        cancelled before that is never sent. A later cancellation does not stop it: do not change
        its arguments, which may still be being sent.
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
        """End all ranks. A second call is a no-op."""
        if self._session is not None and not self._session.lost.done():
            await self._session.leave()
        await self._drop("close() was called")
        await self._release()

    async def _drop(self, reason: str) -> None:
        """End the ranks, if there are any; running and waiting calls then raise `RanksLost` with
        `reason`.
        """
        session, self._session = self._session, None
        if session is not None:
            session.lose(reason)
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
    except Exception as error:  # noqa: BLE001 (unpickling runs code of arbitrary classes)
        return None, RankTraceback.of(rank, error)
    return (None, value) if kind == ERROR else (value, None)
