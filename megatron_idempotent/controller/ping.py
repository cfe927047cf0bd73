"""`ping`: where a run stands, asked by any process of the user on the controller's machine.

A UNIX stream socket in the run's directory. A client sends `ping` and a newline as often as it
likes, and gets one JSON object and a newline each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .protocol import ControllerError

if TYPE_CHECKING:
    from .protocol import Status

SOCKET_FILE = "ping.sock"

# sockaddr_un has 108 bytes on Linux, and a zero behind the path.
_LONGEST_PATH = 107
_LONGEST_ANSWER = 1 << 20


class PingError(ControllerError):
    """A socket that cannot be listened on, or a controller that does not answer."""


class NotListening(PingError):
    """Nobody listens: the run has ended, or has not begun, or its process was killed."""


class PingServer:
    """Answers `ping` in the controller's event loop, for as many clients as there are.

    A client that says nothing, or does not read, is let go after `idle_s`; one that asks something
    else is told so. Example: `async with PingServer(controller.ping, run / SOCKET_FILE): …`
    """

    def __init__(
        self, ping: Callable[[], Awaitable[Status]], path: Path, *, idle_s: float = 60.0
    ) -> None:
        self._ping = ping
        self._path = path
        self._idle_s = idle_s
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, for this user only. The file of a process that has died is replaced.

        Errors: `PingError` where another process listens there, where something else has that name,
        or where the file system has no sockets.
        """
        try:
            listening = _listen(self._path)
        except OSError as error:
            raise PingError(
                f"cannot listen at {self._path}: {error.strerror or error}; the run's directory "
                "has to be on a file system of this machine that takes sockets"
            ) from error
        self._server = await asyncio.start_unix_server(self._connected, sock=listening)

    async def close(self) -> None:
        """Let all clients go and remove the socket. Twice: no-op."""
        server, self._server = self._server, None
        if server is None:
            return
        # The file first: who asks from here on is told that no controller listens.
        self._path.unlink(missing_ok=True)
        server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await server.wait_closed()

    async def __aenter__(self) -> PingServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function, so that no client is unknown to `close` between two turns of the loop.
        if self._server is None:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            more = True
            while more:
                with self._limited(writer):
                    more = await self._answer_one(reader, writer)
            writer.close()
            with self._limited(writer):
                await writer.wait_closed()
        except OSError:
            pass  # the client's own business
        finally:
            writer.transport.abort()

    @contextlib.contextmanager
    def _limited(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Break the connection where the block takes longer than `idle_s`, which ends the block.

        No `wait_for`: before Python 3.12 it can swallow the cancellation of `close`.
        """
        limit = asyncio.get_running_loop().call_later(self._idle_s, writer.transport.abort)
        try:
            yield
        finally:
            limit.cancel()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one line; whether to wait for another."""
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return False
        except asyncio.LimitOverrunError:
            line = b""
        answer = await self._answer(line.strip()) if line else {"error": "that line is too long"}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        return bool(line)

    async def _answer(self, asked: bytes) -> dict[str, Any]:
        if asked != b"ping":
            return {"error": f"asked {asked[:80].decode(errors='replace')!r}; allowed: ping"}
        try:
            return dataclasses.asdict(await self._ping())
        except Exception as error:  # noqa: BLE001 (told to who asked; the run is not to end by it)
            return {"error": f"ping raised {type(error).__name__}: {error}"}


def ask(path: Path, timeout_s: float = 5.0) -> dict[str, Any]:
    """Asks the controller that listens at `path`; returns the fields of `Status`. Blocks.

    Errors: `NotListening` where none listens; `PingError` where it does not answer in `timeout_s`,
        or where its answer is no status.
    """
    try:
        line = _exchange(path, timeout_s)
    except FileNotFoundError as error:
        raise NotListening(
            f"no controller listens at {path}: the run has ended, has not begun, or is on another "
            "machine"
        ) from error
    except ConnectionRefusedError as error:
        raise NotListening(f"the controller that listened at {path} is dead") from error
    except (TimeoutError, BlockingIOError) as error:
        raise PingError(
            f"the controller at {path} did not answer in {timeout_s:g} s: it is stopped, or its "
            "event loop is blocked"
        ) from error
    except OSError as error:
        raise PingError(
            f"cannot ask the controller at {path}: {error.strerror or error}"
        ) from error
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or "error" in answer:
        told = answer["error"] if isinstance(answer, dict) else repr(line[:80])
        raise PingError(f"the controller at {path} answers without a status: {told}")
    return answer


def _exchange(path: Path, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as client, _address(path) as address:
        client.settimeout(timeout_s)
        client.connect(address)
        client.sendall(b"ping\n")
        received = b""
        while not received.endswith(b"\n") and len(received) < _LONGEST_ANSWER:
            # Set anew: byte by byte, an answer could last for ever.
            client.settimeout(max(deadline - time.monotonic(), 0.001))
            part = client.recv(1 << 16)
            if not part:
                break
            received += part
        return received


def _listen(path: Path) -> socket.socket:
    """A listening socket at the path, with mode 0600."""
    _remove_left_behind(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        with _address(path) as address:
            listening.bind(address)
        # Nobody can connect before `listen`, so nobody gets in with the mode of the umask.
        path.chmod(0o600)
        listening.listen(100)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_left_behind(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise PingError(f"cannot listen at {path}: it is there and is no socket; move it away")
    with socket.socket(socket.AF_UNIX) as client, _address(path) as address:
        client.setblocking(False)
        refused = client.connect_ex(address)
    if refused not in (errno.ECONNREFUSED, errno.ENOENT):
        raise PingError(
            f"cannot listen at {path}: another controller of that run does; end it first, or use "
            "another directory"
        )
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """A name of the path that is short enough for the system, while the block runs."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
