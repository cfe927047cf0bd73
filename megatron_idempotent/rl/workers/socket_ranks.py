"""Calls methods on all ranks over their connections, whatever started the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import mmap
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from . import wire
from .protocol import RankFailed, RanksLost, RankTraceback, check_per_rank
from .serve import describe
from .wire import Bytes

Frame = tuple[bytes, list[Bytes]]
#: The event loop goes round after so many bytes of a large frame.
_SLICE = 4 << 20


class Connection:
    """Sends frames to one rank, and always reads from it, so that its end is noticed.

    Example: `kind, parts = await connection.ask(b"C", parts)`.
    """

    def __init__(self, sock: socket.socket, hello: wire.Hello) -> None:
        """Take over a socket that does not block and on which the rank has introduced itself."""
        self.hello = hello
        self.on_end: Callable[[Connection, str], None] | None = None
        self.ended = ""
        """The reason why the connection ended; empty while it has not."""
        self._sock = sock
        self._answers: asyncio.Queue[Frame] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Send a frame, and return the next that comes; wait for ever on an ended connection.

        Do not cancel it if another `ask` is to follow.
        """
        await self.send(kind, parts)
        return await self._answers.get()

    async def send(self, kind: bytes, parts: Sequence[Bytes]) -> None:
        """Send a frame; if the connection ends meanwhile, `on_end` is called and nothing raised."""
        loop = asyncio.get_running_loop()
        small = b"".join((wire.heads(kind, parts), *parts)) if _bytes(parts) < 1 << 16 else b""
        waiting = [small] if small else [wire.heads(kind, parts), *parts]
        async with self._writing:
            try:
                for part in waiting:
                    view = memoryview(part)
                    for start in range(0, view.nbytes, _SLICE):
                        await loop.sock_sendall(self._sock, view[start : start + _SLICE])
                        await asyncio.sleep(0)
            except OSError as error:
                self._end(f"its connection broke: {error}")

    async def _read(self) -> None:
        try:
            while True:
                self._answers.put_nowait(await self._frame())
        except EOFError:
            self._end("its connection was closed")
        except (OSError, wire.WireError) as error:
            self._end(f"its connection broke: {error}")
        except asyncio.CancelledError:
            self.on_end = None  # shut, or the loop is being closed: nobody wants to know
            self._end("it was given up")
            raise

    async def _frame(self) -> Frame:
        kind, count = wire.HEAD.unpack(await receive(self._sock, wire.HEAD.size))
        if count > wire.MOST_PARTS:
            raise wire.WireError(f"a frame of {count} parts")
        lengths = wire.lengths_of(await receive(self._sock, count * wire.LENGTH.size))
        return kind, [await receive(self._sock, length) for length in lengths]

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended = why
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if self.on_end is not None:
                self.on_end(self, why)

    def shut(self) -> None:
        """Close the connection without a call of `on_end`; the rank ends itself. Twice: no-op."""
        self.on_end = None
        self._end("it was ended")
        self._reading.cancel()

    async def closed(self) -> None:
        """Wait for the rank to close its end, and close ours."""
        await asyncio.wait([self._reading])
        async with self._writing:  # it fails now, and must not find another socket of that number
            self._sock.close()


def _bytes(parts: Sequence[Bytes]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


async def receive(sock: socket.socket, size: int) -> bytearray | mmap.mmap:
    """Receive `size` bytes. Errors: `EOFError` where the connection ends before; `OSError`."""
    loop = asyncio.get_running_loop()
    got = wire.room(size)
    view, at, paused = memoryview(got), 0, 0
    while at < size:
        count = await loop.sock_recv_into(sock, view[at : at + _SLICE])
        if not count:
            raise EOFError
        at += count
        if at - paused >= _SLICE:
            paused = at
            await asyncio.sleep(0)
    return got


class WorkerSession:
    """Keeps the ranks of one start together: if one is lost, all are ended."""

    def __init__(
        self,
        connections: Sequence[Connection],
        ended: Callable[[int | None], Awaitable[str]],
    ) -> None:
        """
        Args:
            connections: the connections, by rank.
            ended: ends all ranks in bounded time, and returns what is known of one rank's end.
        """
        self.connections = list(connections)
        self.doing = ""
        """The method that runs; empty while none does."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future of the reason, done once all ranks are ended."""
        self._ended = ended
        self._ending: asyncio.Task[None] | None = None
        for connection in self.connections:
            connection.on_end = self._gone
        for connection in self.connections:
            if connection.ended:
                self._gone(connection, connection.ended)

    @property
    def is_ending(self) -> bool:
        """True if a rank was lost, or all are being ended."""
        return self._ending is not None

    def lose(self, why: str, rank: int | None = None) -> None:
        """End all ranks; the first reason is the one that is told."""
        if self._ending is None:
            for connection in self.connections:
                connection.shut()
            self._ending = asyncio.get_running_loop().create_task(self._end(why, rank))

    async def why(self) -> RanksLost:
        """Return the error for a call, once all ranks are ended."""
        return RanksLost(await asyncio.shield(self.lost))

    def _gone(self, connection: Connection, why: str) -> None:
        rank = connection.hello.rank
        when = f"in {self.doing}()" if self.doing else "while idle"
        self.lose(f"rank {rank} was lost {when}: {why}", rank)

    async def _end(self, why: str, rank: int | None) -> None:
        try:
            known = await self._ended(rank)
        except Exception as error:  # noqa: BLE001 (a pending call must get an answer)
            known = f"and they may not have ended: {error!r}"
        for connection in self.connections:
            await connection.closed()
        known = f" ({known})" if known else ""
        self.lost.set_result(f"{why}{known}; all ranks were ended, and start() makes new ones")


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
    """Implements `RankGroup` for ranks that dial this process; subclasses start and end them."""

    def __init__(self, size: int, *, start_timeout_s: float, call_timeout_s: float | None) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; allowed: 1 rank or more")
        self._size = size
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._session: WorkerSession | None = None
        self._gone = NOT_STARTED
        self._turn = asyncio.Lock()

    # What differs between kinds of ranks ------------------------------------------------------

    async def _launch(self) -> list[Connection]:
        """Start all ranks, and return their connections by rank. Errors: `RanksLost`."""
        raise NotImplementedError

    async def _ended(self, rank: int | None) -> str:
        """End all ranks in bounded time, and return what is known of this one's end."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Free what `_launch` made, besides the ranks. Twice: no-op."""
        raise NotImplementedError

    #: Seconds for a call that runs at `close`, before the ranks are ended in it.
    _goodbye_s = 0.0

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
        session = self._session = WorkerSession(await self._launch(), self._ended)
        try:
            async with self._turn:
                await self._exchange(
                    session, b"M", [[]] * self._size, "start", self._start_timeout_s
                )
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
        """Return the method's results by rank: see `RankGroup.call`.

        `timeout_s` counts from when the call has its turn. A call that is cancelled before its turn
        is never sent. After that it goes on: do not change its arguments, which may be on their
        way.
        """
        check_per_rank(method, per_rank, self._size)
        if self._session is None:
            raise RanksLost(self._gone)
        limit_s = self._call_timeout_s if timeout_s is None else timeout_s
        request = _Request(method=method, args=args, per_rank=per_rank, timeout_s=limit_s)
        task = asyncio.ensure_future(self._in_turn(self._session, request))
        task.add_done_callback(_look_at_error)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not request.sent:
                task.cancel()
            raise

    async def close(self) -> None:
        """End all ranks. Twice: no-op."""
        if self._session is not None and not self._session.lost.done():
            await self._say_goodbye(self._session)
        await self._drop("close() was called")
        await self._release()

    async def _in_turn(self, session: WorkerSession, request: _Request) -> list[Any]:
        async with self._turn:
            if session.is_ending:
                raise await session.why()
            plain = request.per_rank is None and all(type(arg) in _PLAIN for arg in request.args)
            if plain:
                frames = _frames(request, self._size)
            else:  # what the arguments are like shows only when they are pickled
                frames = await asyncio.to_thread(_frames, request, self._size)
            request.sent = True
            return await self._exchange(session, b"C", frames, request.method, request.timeout_s)

    async def _exchange(
        self,
        session: WorkerSession,
        kind: bytes,
        frames: Sequence[Sequence[wire.Bytes]],
        method: str,
        timeout_s: float | None,
    ) -> list[Any]:
        session.doing = method
        asked = [
            asyncio.ensure_future(connection.ask(kind, frame))
            for connection, frame in zip(session.connections, frames, strict=True)
        ]
        answered = asyncio.ensure_future(asyncio.wait(asked))
        try:
            waiting: set[asyncio.Future[Any]] = {answered, session.lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return await _results(method, [each.result() for each in asked])
            silent = ", ".join(str(rank) for rank, each in enumerate(asked) if not each.done())
            session.lose(f"{method}() was not answered in {timeout_s} s by rank {silent}")
            raise await session.why()
        finally:
            for each in (answered, *asked):
                each.cancel()
            await asyncio.wait({answered, *asked})
            session.doing = ""

    async def _say_goodbye(self, session: WorkerSession) -> None:
        """Let idle ranks end by themselves; ranks in a call have `_goodbye_s` to end it."""
        try:
            await asyncio.wait_for(self._turn.acquire(), max(self._goodbye_s, 1e-3))
        except asyncio.TimeoutError:
            return
        try:
            for connection in session.connections:
                connection.on_end = None
            leaving = asyncio.gather(*(each.send(b"G", []) for each in session.connections))
            left = asyncio.gather(*(each.closed() for each in session.connections))
            for step in (leaving, left):
                await asyncio.wait([step], timeout=max(self._goodbye_s, 2.0))
        finally:
            self._turn.release()

    async def _drop(self, why: str) -> None:
        """End the ranks, if there are any; calls that run or wait fail with this reason."""
        session, self._session = self._session, None
        self._gone = NOT_STARTED
        if session is not None:
            session.lose(why)
            await asyncio.shield(session.lost)


def _frames(request: _Request, size: int) -> list[list[wire.Bytes]]:
    """Make each rank's parts: the number of common parts, the common ones, and its own."""
    common = wire.dump((request.method, request.args))
    head = [len(common).to_bytes(4, "big"), *common]
    if request.per_rank is None:
        return [head] * size
    return [[*head, *wire.dump(own)] for own in request.per_rank]


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
        found = wire.load(parts)
    except Exception as error:  # noqa: BLE001 (what was sent, a class's own code decides)
        return None, describe(rank, error)
    return (None, found) if kind == b"E" else (found, None)


def _look_at_error(task: asyncio.Task[list[Any]]) -> None:
    """Take the error, so that asyncio does not report it if the caller was cancelled."""
    if not task.cancelled():
        task.exception()
