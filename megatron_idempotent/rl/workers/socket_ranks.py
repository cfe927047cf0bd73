"""Lets ranks in, and calls methods on all of them over their connections, whatever started them."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import wire
from .protocol import RankFailed, RanksLost, RankTraceback


class Connection:
    """Sends frames to one rank, and always reads from it, so that its end is noticed.

    Example: `kind, parts = await connection.ask(wire.CALL, parts)`.
    """

    def __init__(self, sock: socket.socket, hello: wire.Hello) -> None:
        """Take over a socket on which the rank has introduced itself."""
        self.hello = hello
        self.on_end: Callable[[Connection], None] | None = None
        self.ended = ""
        """The reason why the connection ended; empty while it has not."""
        sock.setblocking(False)
        self._sock = sock
        self._answers: asyncio.Queue[wire.Frame] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, kind: bytes, parts: Sequence[wire.Bytes]) -> wire.Frame:
        """Send a frame, and return the next that comes; wait for ever on an ended connection.

        Do not cancel it if another `ask` is to follow.
        """
        await self.send(kind, parts)
        return await self._answers.get()

    async def send(self, kind: bytes, parts: Sequence[wire.Bytes]) -> None:
        """Send a frame; if the connection ends meanwhile, `on_end` is called and nothing raised."""
        loop = asyncio.get_running_loop()
        async with self._writing:
            try:
                for buffer in wire.packed(kind, parts):
                    await loop.sock_sendall(self._sock, buffer)
            except OSError as error:
                self._end(f"its connection broke: {error}")

    def shut(self) -> None:
        """Close the connection without a call of `on_end`; the rank ends itself. Twice: no-op."""
        self.on_end = None
        self._end("it was ended")

    async def closed(self) -> None:
        """Wait for the rank to close its end, and close ours."""
        await asyncio.wait([self._reading])
        async with self._writing:  # it fails now, and must not find another socket of that number
            self._sock.close()

    async def _read(self) -> None:
        try:
            while True:
                kind, count = wire.HEAD.unpack(await self._receive(wire.HEAD.size))
                lengths = await self._receive(count * wire.LENGTH.size)
                parts: list[wire.Bytes] = []
                for (length,) in wire.LENGTH.iter_unpack(lengths):
                    parts.append(await self._receive(length))
                self._answers.put_nowait((kind, parts))
                del parts  # or a large answer would live until the next
        except EOFError:
            self._end("its connection was closed")
        except OSError as error:
            self._end(f"its connection broke: {error}")
        except asyncio.CancelledError:
            self.shut()  # the loop is being closed: nobody wants to know
            raise

    async def _receive(self, size: int) -> bytearray | mmap.mmap:
        loop = asyncio.get_running_loop()
        got = wire.room(size)
        view, at = memoryview(got), 0
        while at < size:
            count = await loop.sock_recv_into(self._sock, view[at:])
            if not count:
                raise EOFError
            at += count
            if size >= wire.BESIDE:  # from a fast rank it would never wait, nor let others run
                await asyncio.sleep(0)
        return got

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended = why
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if self.on_end is not None:
                self.on_end(self)


class Server:
    """Accepts the ranks of one start at a time, and checks who they are before it reads a pickle.

    `complete` hands out the ranks of a start once all have come, and nobody else of it is let in
    from then on. A start that loses a rank before that is dropped as a whole. A rank 0 that asks
    for it begins a new start, which drops the ranks that wait.

    Example: `connections = await server.complete(60.0)`, after `listen`.
    """

    def __init__(self, size: int, token: bytes) -> None:
        """Take the number of ranks, and the secret that they must know."""
        self._size, self._token = size, token
        self._generation: str | None = ""
        self._waiting: dict[int, Connection] = {}
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        # Its own: those who dial and say nothing hold a thread each.
        self._threads = ThreadPoolExecutor(64, "introductions")
        self._listener: socket.socket | None = None
        self._refused = ""

    def listen(self, address: wire.Address, *, announce: str = "") -> wire.Address:
        """Begin to accept at the path of a Unix socket, or at a host and a port, 0 for any free.

        Returns the address for ranks: with the port, and with `announce` as its host if given.
        """
        if isinstance(address, str):
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(address)
            self._listener.listen(self._size + 16)
        else:
            self._listener = socket.create_server(address, backlog=self._size + 16)
            address = (announce or address[0], self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener), self._tasks)
        return address

    async def complete(
        self, timeout_s: float, ended: Iterable[asyncio.Future[Any]] = ()
    ) -> list[Connection] | None:
        """Return the connections of all ranks of a start, by rank.

        It returns None once the time is up or one of `ended` is done; `missing` says who has come.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while len(self._waiting) < self._size:
            left_s = until - loop.time()
            if left_s <= 0 or any(each.done() for each in ended):
                return None
            self._changed = loop.create_future()
            waiting = [self._changed, *ended]
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        found, self._waiting, self._generation = self._waiting, {}, None
        return [found[rank] for rank in range(self._size)]

    def missing(self) -> str:
        """Describe which ranks have come, and who was turned away last."""
        have = f"rank {', '.join(map(str, sorted(self._waiting)))}" if self._waiting else "none"
        refused = f"; last refused: {self._refused}" if self._refused else ""
        return f"of {self._size} ranks {have} came{refused}"

    def drop(self, connections: Iterable[Connection]) -> None:
        """Close connections that `complete` has handed out; `close` waits until they are."""
        for connection in connections:
            connection.shut()
            self._spawn(connection.closed(), self._closing)

    async def close(self) -> None:
        """Accept nobody any more, and drop ranks that wait. Twice: no-op.

        Connections that were handed out stay.
        """
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._drop_start()
        while self._closing:
            await asyncio.wait(self._closing)
        self._threads.shutdown(wait=False)
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # such as too many open files: those who wait are not lost by that
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._meet(sock), self._tasks)

    async def _meet(self, sock: socket.socket) -> None:
        """Introduce a process that dials, and close its socket unless it is let in."""
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        let_in = False
        try:
            wire.tune(sock)
            hello = await loop.run_in_executor(self._threads, wire.meet, sock, self._token)
            connection = Connection(sock, hello)
            if reason := self._refusal(hello):
                self._refused = f"rank {hello.rank}: {reason}"
                await connection.send(wire.REFUSED, wire.dump(reason))
            else:
                let_in = True
                await self._let_in(connection)
        except wire.WireError as error:
            self._refused = str(error)
        except (OSError, EOFError) as error:
            self._refused = f"one who did not introduce itself ({error!r})"
        finally:
            if connection is None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # for the thread that may still wait for it
                sock.close()
            elif not let_in:
                self.drop([connection])

    def _refusal(self, hello: wire.Hello) -> str:
        if not 0 <= hello.rank < self._size:
            return f"rank {hello.rank} of a group of {self._size}"
        if hello.rank == 0 and hello.generation is None:
            return ""
        if hello.generation != self._generation:
            return "it belongs to another start"
        if hello.rank in self._waiting:
            return f"rank {hello.rank} is there already"
        return ""

    async def _let_in(self, connection: Connection) -> None:
        if connection.hello.generation is None:
            self._drop_start()
            self._generation = secrets.token_hex(8)
        self._waiting[connection.hello.rank] = connection
        connection.on_end = self._gone
        if connection.ended:
            self._gone(connection)
        await connection.send(wire.WELCOME, wire.dump(self._generation))
        if not self._changed.done():
            self._changed.set_result(None)

    def _gone(self, connection: Connection) -> None:
        """Drop the start of a rank that ended while others are still awaited."""
        rank = connection.hello.rank
        if self._waiting.get(rank) is connection:
            self._refused = f"rank {rank} came and was lost again: {connection.ended}"
            self._drop_start()

    def _drop_start(self) -> None:
        waiting, self._waiting, self._generation = self._waiting, {}, None
        self.drop(waiting.values())


class _Session:
    """Keeps the ranks of one start together: if one is lost, all are ended."""

    def __init__(
        self, connections: Sequence[Connection], ended: Callable[[int | None], Awaitable[str]]
    ) -> None:
        """Take connections by rank, and what ends all ranks and tells what is known of one's end.

        It takes a bounded time.
        """
        self.connections = connections
        self.turn = asyncio.Lock()
        self.doing = ""
        """The method that runs; empty while none does."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future of the reason, done once all ranks are ended."""
        self.ending: asyncio.Task[None] | None = None
        self._ended = ended
        for connection in connections:
            connection.on_end = self._gone
        for connection in connections:
            if connection.ended:
                self._gone(connection)

    def lose(self, why: str, rank: int | None = None) -> None:
        """End all ranks; the first reason is the one that is told."""
        if self.ending is None:
            for connection in self.connections:
                connection.shut()
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
        if per_rank is None and all(type(each) in _PLAIN for each in args):
            frames = self._frames((method, args), None)
        else:  # what the arguments are like shows only when they are pickled
            frames = await asyncio.to_thread(self._frames, (method, args), per_rank)
        return await self.exchange(wire.CALL, frames, method, timeout_s)

    def called(self, done: asyncio.Future[list[Any]]) -> None:
        """Give the turn to the next, and look at an error whose caller may be cancelled."""
        self.turn.release()
        if not done.cancelled():
            done.exception()

    async def exchange(
        self,
        kind: bytes,
        frames: Sequence[Sequence[wire.Bytes]],
        method: str,
        timeout_s: float | None,
    ) -> list[Any]:
        """Send a frame to each rank, and return what they answer."""
        self.doing = method
        asked = [
            asyncio.ensure_future(connection.ask(kind, frame))
            for connection, frame in zip(self.connections, frames, strict=True)
        ]
        answered = asyncio.ensure_future(asyncio.wait(asked))
        try:
            waiting: set[asyncio.Future[Any]] = {answered, self.lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return await _results(method, [each.result() for each in asked])
            silent = ", ".join(str(rank) for rank, each in enumerate(asked) if not each.done())
            self.lose(f"{method}() was not answered in {timeout_s} s by rank {silent}")
            raise await self.why()
        finally:
            for each in (answered, *asked):
                each.cancel()
            await asyncio.wait({answered, *asked})
            self.doing = ""

    async def say_goodbye(self, limit_s: float) -> None:
        """Let idle ranks end by themselves; ranks in a call have `limit_s` to end it."""
        try:
            await asyncio.wait_for(self.turn.acquire(), max(limit_s, 1e-3))
        except asyncio.TimeoutError:
            return
        try:
            for connection in self.connections:
                connection.on_end = None
            leaving = asyncio.gather(*(each.send(wire.GOODBYE, []) for each in self.connections))
            left = asyncio.gather(*(each.closed() for each in self.connections))
            for step in (leaving, left):
                await asyncio.wait([step], timeout=max(limit_s, 2.0))
        finally:
            self.turn.release()

    def _frames(self, common: Any, per_rank: Sequence[Any] | None) -> list[list[wire.Bytes]]:
        """Make each rank's parts: the number of common parts, the common ones, and its own."""
        parts = wire.dump(common)
        head = [len(parts).to_bytes(4, "big"), *parts]
        if per_rank is None:
            return [head] * len(self.connections)
        return [[*head, *wire.dump(own)] for own in per_rank]

    def _gone(self, connection: Connection) -> None:
        rank = connection.hello.rank
        when = f"in {self.doing}()" if self.doing else "while idle"
        self.lose(f"rank {rank} was lost {when}: {connection.ended}", rank)

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


class SocketRanks:
    """Implements `RankGroup` for ranks that dial this process; subclasses start and end them."""

    def __init__(self, size: int, *, start_timeout_s: float, call_timeout_s: float | None) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; allowed: 1 rank or more")
        self._size = size
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._session: _Session | None = None

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
        session = self._session = _Session(await self._launch(), self._ended)
        try:
            async with session.turn:
                nothing: list[list[wire.Bytes]] = [[]] * self._size
                await session.exchange(wire.MAKE, nothing, "start", self._start_timeout_s)
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
            await self._session.say_goodbye(self._goodbye_s)
        await self._drop("close() was called")
        await self._release()

    async def _complete(
        self,
        server: Server,
        ended: Iterable[asyncio.Future[Any]] = (),
        how: Callable[[], str] = str,
        *,
        remedy: str = "",
    ) -> list[Connection]:
        """Wait for the ranks of a start. Errors: `RanksLost`, also if one of `ended` is done.

        `how` says how ranks have ended, or is empty if they have not.
        """
        connections = await server.complete(self._start_timeout_s, ended)
        if connections is None:
            why = how() or f"{server.missing()} within {self._start_timeout_s:g} s{remedy}"
            raise RanksLost(f"the ranks could not be started: {why}")
        return connections

    async def _drop(self, why: str) -> None:
        """End the ranks, if there are any; calls that run or wait fail with this reason."""
        session, self._session = self._session, None
        if session is not None:
            session.lose(why)
            await asyncio.shield(session.lost)


async def _results(method: str, frames: Sequence[wire.Frame]) -> list[Any]:
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


def _read(rank: int, frame: wire.Frame) -> tuple[Any, RankTraceback | None]:
    kind, parts = frame
    try:
        found = wire.load(parts)
    except Exception as error:  # noqa: BLE001 (what was sent, a class's own code decides)
        return None, RankTraceback.of(rank, error)
    return (None, found) if kind == wire.ERROR else (found, None)
