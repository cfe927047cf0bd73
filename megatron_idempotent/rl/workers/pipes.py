"""Carries frames between a controller and a rank that was forked with a pipe to it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
from collections.abc import Callable, Sequence

from . import frames

#: Seconds for an idle rank to end once it is told to.
_LEAVE_S = 2.0


class PipeLink:
    """Implements `ranks.Link`; always reads from the pipe, so that the rank's end is noticed.

    Example: `kind, parts = await link.ask(frames.CALL, parts)`.
    """

    def __init__(self, pipe: socket.socket) -> None:
        """Take over the controller's end of the pipe."""
        self.on_end: Callable[[], None] | None = None
        self.ended = ""
        pipe.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            pipe.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self._pipe = pipe
        self._answers: asyncio.Queue[frames.Frame] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def ready(self) -> int:
        """Wait until the rank is ready, and return its process id; for ever if it ends before."""
        _, parts = await self._answers.get()
        return int.from_bytes(parts[0], "big")

    async def ask(self, kind: bytes, parts: Sequence[frames.Bytes]) -> frames.Frame:
        """Send a frame and return the answer: see `ranks.Link.ask`."""
        await self._send(kind, parts)
        return await self._answers.get()

    async def leave(self) -> None:
        """Tell an idle rank to end, and wait for a bounded time until it has."""
        sending = asyncio.ensure_future(self._send(frames.GOODBYE, []))
        await asyncio.wait([sending, self._reading], timeout=_LEAVE_S)

    def shut(self) -> None:
        """Close the pipe for both sides; the rank ends itself."""
        self.on_end = None
        self._end("it was ended")

    async def closed(self) -> None:
        """Wait for the rank to close its end, and close ours."""
        await asyncio.wait([self._reading])
        async with self._writing:  # it fails now, and must not find another pipe of that number
            self._pipe.close()

    async def _send(self, kind: bytes, parts: Sequence[frames.Bytes]) -> None:
        """Send a frame; if the rank ends meanwhile, `on_end` is called and nothing raised."""
        loop = asyncio.get_running_loop()
        async with self._writing:
            try:
                for buffer in frames.packed(kind, parts):
                    await loop.sock_sendall(self._pipe, buffer)
            except OSError as error:
                self._end(f"its pipe broke: {error}")

    async def _read(self) -> None:
        try:
            while True:
                kind, count = frames.HEAD.unpack(await self._receive(frames.HEAD.size))
                lengths = await self._receive(count * frames.LENGTH.size)
                parts: list[frames.Bytes] = []
                for (length,) in frames.LENGTH.iter_unpack(lengths):
                    parts.append(await self._receive(length))
                self._answers.put_nowait((kind, parts))
                del parts  # or a large answer would live until the next
        except EOFError:
            self._end("its pipe was closed")
        except OSError as error:
            self._end(f"its pipe broke: {error}")
        except asyncio.CancelledError:
            self.shut()  # the loop is being closed: nobody wants to know
            raise

    async def _receive(self, size: int) -> bytearray | mmap.mmap:
        loop = asyncio.get_running_loop()
        received = frames.room(size)
        view, at = memoryview(received), 0
        while at < size:
            count = await loop.sock_recv_into(self._pipe, view[at:])
            if not count:
                raise EOFError
            at += count
            if size >= frames.BESIDE:  # from a fast rank it would never wait, nor let others run
                await asyncio.sleep(0)
        return received

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended = why
            with contextlib.suppress(OSError):
                self._pipe.shutdown(socket.SHUT_RDWR)
            if self.on_end is not None:
                self.on_end()
