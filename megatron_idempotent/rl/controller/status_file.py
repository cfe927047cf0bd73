"""Writes the state of a run to `status.json` every second, for other processes to read.

The module does not import torch. The file is replaced atomically, also on a shared file system. An
old file means that the controller was killed or stopped, or that its event loop is blocked; a run
that ends writes a final status with the state `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_idempotent.json_text import parse_json
from megatron_idempotent.rl.metrics.loggers import write_whole
from megatron_idempotent.rl.workers.protocol import is_alive

from .protocol import ControllerError

if TYPE_CHECKING:
    from .protocol import Status

STATUS_FILE = "status.json"


class StatusError(ControllerError):
    """A run's status file cannot be written or read, or is outdated."""


class StatusFile:
    """Writes a run's status to a file every `every_s` seconds during an `async with` block, and
    once when the block ends.

    `ping` returns the status, and is called in the controller's event loop.

    Example: `async with StatusFile(controller.ping, folder / STATUS_FILE): await training`
    """

    def __init__(
        self, ping: Callable[[], Awaitable[Status]], path: Path, *, every_s: float = 1.0
    ) -> None:
        self._ping = ping
        self._path = path
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StatusFile:
        """Write the first status, and start the task that writes the further ones. Raise
        `StatusError` if another controller writes this file.

        Raises:
            StatusError: the file cannot be written, or another controller writes it.
        """
        await asyncio.to_thread(_refuse_a_second, self._path)
        try:
            await self._write()
        except OSError as error:
            raise StatusError(
                f"cannot write {self._path}: {error.strerror or error}; use a directory that this "
                "process can write to"
            ) from error
        self._task = asyncio.ensure_future(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._try_to_write()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._try_to_write()

    async def _try_to_write(self) -> None:
        # A full disk does not end the run; readers will report an old file.
        with contextlib.suppress(OSError, ControllerError):
            await self._write()

    async def _write(self) -> None:
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "every_s": self._every_s,
            "status": dataclasses.asdict(await self._ping()),
        }
        await asyncio.to_thread(write_whole, self._path, f"{json.dumps(content)}\n")


def read_status(path: Path) -> dict[str, Any]:
    """Return the fields of `Status` from a run's status file. Raise `StatusError` if the run has
    not ended and the file is older than 5 s plus the interval at which it is written.

    Raises:
        StatusError: the file is missing, unreadable or too old, or is not a status file.
    """
    try:
        text, written = path.read_text(encoding="utf-8"), path.stat().st_mtime
        content = parse_json(text)
        status: dict[str, Any] = content["status"]
        allowed_s = 5.0 + float(content["every_s"])
        state, writer = status["state"], f"{content['host']}, process {content['pid']}"
    except FileNotFoundError as error:
        raise StatusError(
            f"{path} is not there: the run has not begun; start it, or give another directory"
        ) from error
    except OSError as error:
        raise StatusError(
            f"cannot read {path}: {error.strerror or error}; let this user read the run's directory"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StatusError(
            f"{path} holds no status ({type(error).__name__}: {error}); give a run's directory"
        ) from error
    age_s = time.time() - written
    if state != "ended" and age_s > allowed_s:
        raise StatusError(
            f"{path} is {age_s:.0f} s old, allowed: {allowed_s:g} s; the controller on {writer} "
            "was killed, is stopped, or its event loop is blocked"
        )
    return status


def _refuse_a_second(path: Path) -> None:
    try:
        state = read_status(path)["state"]
        writer = parse_json(path.read_text(encoding="utf-8"))
    except (StatusError, OSError, ValueError):
        return
    # After a controller was killed, a new one may start at once.
    dead = writer["host"] == socket.gethostname() and not is_alive(writer["pid"])
    if state != "ended" and not dead:
        raise StatusError(
            f"another controller writes {path}, process {writer['pid']} on {writer['host']}: end "
            "it first, or use another directory"
        )
