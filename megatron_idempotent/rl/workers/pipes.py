"""Sends frames between a controller and a forked rank, over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import struct
from collections.abc import Callable, Sequence

from . import frames

#: Seconds for an idle rank to end after GOODBYE.
_LEAVE_S = 2.0


class PipeLink:
    """Connects the controller to a forked rank over a pipe (`ranks.Link`); reads continuously, to
    notice the rank's end.

    Example: `kind, parts = await link.ask(frames.CALL, parts)`.
    """

    def __init__(self, pipe: socket.socket) -> None:
        """Take over the controller's end of the pipe, and start to read from it."""
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
        """Wait for the rank's READY frame; return the rank's process id.

        If the rank ends first, the call stays pending until it is cancelled.
        """
        _, parts = await self._answers.get()
        return int.from_bytes(parts[0], "big")

    async def ask(self, kind: bytes, parts: Sequence[frames.Bytes]) -> frames.Frame:
        """Send a frame to the rank, and return the rank's reply; see `ranks.Link.ask`."""
        await self._send(kind, parts)
        return await self._answers.get()

    async def leave(self) -> None:
        """Tell an idle rank to end, and wait up to `_LEAVE_S` seconds until it has ended."""
        sending = asyncio.ensure_future(self._send(frames.GOODBYE, []))
        await asyncio.wait([sending, self._reading], timeout=_LEAVE_S)

    def shut(self) -> None:
        """Shut the pipe down in both directions; the rank then ends itself."""
        self.on_end = None
        self._end("it was ended")

    async def closed(self) -> None:
        """Wait until the rank closes its end of the pipe, and close this end."""
        await asyncio.wait([self._reading])
        async with (
            self._writing
        ):  # a send fails now, but must not meet a new pipe with the same descriptor
            self._pipe.close()

    async def _send(self, kind: bytes, parts: Sequence[frames.Bytes]) -> None:
        """Send a frame to the rank; if the rank has ended, call `on_end` instead of raising."""
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
                kind, count = struct.unpack(frames.HEAD, await self._receive(frames.HEAD_SIZE))
                lengths = await self._receive(count * frames.LENGTH_SIZE)
                parts: list[frames.Bytes] = []
                for (length,) in struct.iter_unpack(frames.LENGTH, lengths):
                    parts.append(await self._receive(length))
                self._answers.put_nowait((kind, parts))
                del parts  # else a large reply stays in memory until the next one
        except EOFError:
            self._end("its pipe was closed")
        except OSError as error:
            self._end(f"its pipe broke: {error}")
        except asyncio.CancelledError:
            self.shut()  # the event loop is closing
            raise

    async def _receive(self, size: int) -> bytearray | mmap.mmap:
        loop = asyncio.get_running_loop()
        received = frames.room(size)
        view, offset = memoryview(received), 0
        while offset < size:
            count = await loop.sock_recv_into(self._pipe, view[offset:])
            if not count:
                raise EOFError
            offset += count
            if size >= frames.BESIDE:  # a fast rank would never let other tasks run
                await asyncio.sleep(0)
        return received

    def _end(self, reason: str) -> None:
        if not self.ended:
            self.ended = reason
            with contextlib.suppress(OSError):
                self._pipe.shutdown(socket.SHUT_RDWR)
            if self.on_end is not None:
                self.on_end()
