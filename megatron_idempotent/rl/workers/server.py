"""Accepts ranks that dial, and checks who they are before it unpickles what they say."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Coroutine, Iterable
from typing import Any

from . import wire
from .socket_ranks import Connection, receive


class Server:
    """Accepts the ranks of one start at a time, and of no earlier one.

    The ranks of one start are a generation. `complete` hands out the first generation of which all
    ranks have come, and lets nobody else of it in from then on. A generation that loses a rank
    before that is dropped as a whole.

    Example:
        server = Server(size=2, token=wire.new_token())
        address = server.listen("unix:/run/user/1000/ranks")
        connections = await server.complete(timeout_s=60.0)
    """

    def __init__(self, size: int, token: bytes, *, expected: bytes | None = None) -> None:
        """
        Args:
            size: the number of ranks of a generation.
            token: the secret that ranks must know.
            expected: the one generation that is let in; None for any new one.
        """
        self._size, self._token, self._expected = size, token, expected
        self._waiting: dict[bytes, dict[int, Connection]] = {}
        self._over: set[bytes] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._refused = ""

    def listen(self, address: str, *, announce: str = "") -> str:
        """Begin to accept at `unix:PATH`, or `tcp:HOST:PORT` with 0 for any free port.

        Returns the address for ranks: with the port, and with `announce` as its host if given.
        """
        kind, _, where = address.partition(":")
        if kind == "unix":
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(where)
            listener.listen(self._size + 16)
        else:
            host, _, port = where.rpartition(":")
            listener = socket.create_server((host, int(port)), backlog=self._size + 16)
            address = f"tcp:{announce or host}:{listener.getsockname()[1]}"
        listener.setblocking(False)
        self._listener = listener
        self._spawn(self._accept(listener), self._tasks)
        return address

    async def complete(self, timeout_s: float) -> list[Connection]:
        """Return the connections of a complete generation, by rank.

        Errors: `asyncio.TimeoutError`; `missing` says which ranks had come by then.
        """
        return await asyncio.wait_for(self._complete(), timeout_s)

    async def complete_unless(
        self, ended: Iterable[asyncio.Future[Any]], timeout_s: float
    ) -> list[Connection] | None:
        """Wait as `complete` does; return None once the time is up or one of `ended` is done.

        If this call is cancelled in the moment in which all ranks have come, they are dropped.
        """
        arriving = asyncio.ensure_future(self.complete(timeout_s))
        taken = False
        try:
            await asyncio.wait([arriving, *ended], return_when=asyncio.FIRST_COMPLETED)
            if arriving.done() and arriving.exception() is None:
                taken = True
                return arriving.result()
        finally:
            arriving.cancel()
            await asyncio.wait([arriving])
            if not taken and not arriving.cancelled() and arriving.exception() is None:
                self.drop(arriving.result())
        return None

    async def _complete(self) -> list[Connection]:
        while True:
            for generation, found in self._waiting.items():
                if len(found) == self._size:
                    del self._waiting[generation]
                    self._over.add(generation)
                    return [found[rank] for rank in range(self._size)]
            self._changed.clear()
            await self._changed.wait()

    def missing(self) -> str:
        """Describe which ranks have come, and who was turned away last."""
        come = [sorted(found) for found in self._waiting.values()]
        have = " and ".join(f"rank {', '.join(map(str, ranks))}" for ranks in come) or "none"
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
        for generation in list(self._waiting):
            self._drop_generation(generation)
        while self._closing:
            await asyncio.wait(self._closing)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

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
            sock.setblocking(False)
            self._spawn(self._meet(sock), self._tasks)

    async def _meet(self, sock: socket.socket) -> None:
        """Introduce a process that dials, and close its socket unless it is let in."""
        let_in = False
        try:
            wire.tune(sock)
            let_in = await asyncio.wait_for(self._introduced(sock), wire.GREETING_S)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            self._refused = f"one who did not introduce itself ({error!r})"
        finally:
            if not let_in:
                sock.close()

    async def _introduced(self, sock: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        greeting = wire.GREETING.pack(wire.MAGIC, secrets.token_bytes(wire.NONCE))
        await loop.sock_sendall(sock, greeting)
        said = bytes(await receive(sock, wire.HELLO.size))
        proof = await receive(sock, wire.PROOF)
        if not hmac.compare_digest(proof, wire.rank_proof(self._token, greeting, said)):
            self._refused = "one with another token"
            return False
        _, generation, rank, pid = wire.HELLO.unpack(said)
        hello = wire.Hello(generation=generation, rank=rank, pid=pid)
        reason = "" if rank == wire.PROBE else self._refusal(hello)
        verdict = wire.VERDICT.pack(wire.REFUSED if reason else wire.WELCOME, len(reason.encode()))
        own_proof = wire.controller_proof(self._token, greeting, said)
        await loop.sock_sendall(sock, verdict + reason.encode() + own_proof)
        if reason or rank == wire.PROBE:
            self._refused = f"rank {rank}: {reason}" if reason else self._refused
            return False
        if again := self._refusal(hello):  # the same rank may have come meanwhile
            self._refused = f"rank {rank}: {again}"
            return False
        if rank == 0:  # who makes up the id of a generation: what waits is of an earlier one
            for other in set(self._waiting) - {generation}:
                self._drop_generation(other)
        connection = Connection(sock, hello)
        connection.on_end = self._gone
        self._waiting.setdefault(generation, {})[rank] = connection
        self._changed.set()
        return True

    def _refusal(self, hello: wire.Hello) -> str:
        if not 0 <= hello.rank < self._size:
            return f"rank {hello.rank} of a group of {self._size}"
        if hello.generation in self._over:
            return "it belongs to an earlier start, which is over"
        if self._expected not in (None, hello.generation):
            return "it belongs to another start"
        if hello.rank in self._waiting.get(hello.generation, {}):
            return f"rank {hello.rank} is there already"
        return ""

    def _gone(self, connection: Connection, why: str) -> None:
        """Drop the generation of a rank that ended while the others are still awaited."""
        self._refused = f"rank {connection.hello.rank} came and was lost again: {why}"
        self._drop_generation(connection.hello.generation)

    def _drop_generation(self, generation: bytes) -> None:
        self._over.add(generation)
        self.drop(self._waiting.pop(generation, {}).values())
