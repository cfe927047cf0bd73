"""The controller's end of one rank's connection."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
from collections.abc import Callable, Sequence

from . import wire
from .pickles import Bytes

Frame = tuple[bytes, list[Bytes]]
#: The event loop goes round at least so often while a large frame passes.
_SLICE = 4 << 20


class Connection:
    """Frames to and from one rank, of which there is always a reader, so that its end is noticed.

    Example: `kind, parts = await connection.ask(b"C", parts)`.
    """

    def __init__(self, sock: socket.socket, hello: wire.Hello) -> None:
        """The socket does not block, and is past the introduction."""
        self.hello = hello
        self.on_end: Callable[[Connection, str], None] | None = None
        self.ended = ""
        """Why it ended; empty while it has not."""
        self._sock = sock
        self._answers: asyncio.Queue[Frame] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Send a frame and wait for the next one; for ever where the connection has ended.

        Not to be cancelled while another `ask` is to follow.
        """
        await self.send(kind, parts)
        return await self._answers.get()

    async def send(self, kind: bytes, parts: Sequence[Bytes]) -> None:
        """Send a frame. That the connection ends meanwhile is `on_end`'s to tell."""
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
        """Close it without a word to `on_end`; the rank ends itself. Twice: no-op."""
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
    """Receives `size` bytes. Errors: `EOFError` where the connection ends before; `OSError`."""
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
