"""Lets ranks find a controller that others started, by a file in a directory of the run.

Importing this does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import wire

#: The files that say where a controller listens, and how the last one ended.
FILE, EXIT_FILE = "controller.json", "controller-exit.json"
#: Variables of a controller that a rank started: the id that its exit is filed under, and the host
#: at which ranks on other machines find it.
RUN_ID, HOST = "MEGATRON_IDEMPOTENT_RUN_ID", "MEGATRON_IDEMPOTENT_HOST"
_PROBE_S = 5.0


class RendezvousError(RuntimeError):
    """A controller cannot be found, or must not be trusted; the message names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControllerAddress:
    """Says where a controller is, and its token. Example: `ControllerAddress.read(directory)`."""

    address: str
    token: str
    """The token in hexadecimal."""
    node: str
    """The name of the controller's machine."""
    pid: int
    """The controller's process id on that machine."""
    run_id: str = ""
    """The id that the controller's exit is filed under; empty if the user started it."""

    @classmethod
    def here(cls, address: str, token: bytes) -> ControllerAddress:
        """Make the address of a controller in this process."""
        run_id = os.environ.get(RUN_ID, "")
        node, pid = socket.gethostname(), os.getpid()
        return cls(address=address, token=token.hex(), node=node, pid=pid, run_id=run_id)

    @classmethod
    def read(cls, directory: Path) -> ControllerAddress | None:
        """Read what a controller wrote; None if there is no file.

        Errors: `RendezvousError` for a file of another user, one that others may read, and one that
            is not complete.
        """
        fields = read_private(directory / FILE)
        if fields is None:
            return None
        try:
            found = cls(**fields)
            bytes.fromhex(found.token)
        except (TypeError, ValueError) as error:
            raise RendezvousError(
                f"{directory / FILE} does not say where a controller is ({error}); remove it"
            ) from error
        return found

    def write(self, directory: Path) -> None:
        """Write the address for ranks into a file that only this user can read."""
        write_private(directory / FILE, dataclasses.asdict(self))

    def remove(self, directory: Path) -> None:
        """Remove the file, unless another controller has written its own."""
        with contextlib.suppress(RendezvousError):
            if ControllerAddress.read(directory) == self:
                (directory / FILE).unlink(missing_ok=True)

    def answers(self) -> bool:
        """Return whether the controller is there, and knows the token.

        Errors: `RendezvousError` if its process lives on this machine and does not answer: a second
            controller beside it would write into the same run.
        """
        hello = wire.Hello(generation=bytes(16), rank=wire.PROBE, pid=os.getpid())
        try:
            connection = wire.connect(self.address, _PROBE_S)
        except (ConnectionError, FileNotFoundError, socket.gaierror):
            return False
        except OSError as error:
            return self._silent(error)
        with contextlib.closing(connection):
            try:
                wire.introduce(connection, bytes.fromhex(self.token), hello)
            except (wire.WireError, EOFError, ConnectionError):
                return False  # its port is another program's now
            except OSError as error:
                return self._silent(error)
        return True

    def alive(self) -> bool:
        """Return whether the controller's process lives, as far as this machine can see."""
        if self.node != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _silent(self, error: OSError) -> bool:
        if self.alive():
            raise RendezvousError(
                f"the controller with process id {self.pid} does not answer at {self.address} "
                f"within {_PROBE_S:g} s ({error}); end it, or let it go on"
            ) from error
        return False


def new_run_id() -> str:
    """Return an id for a controller that is about to be started."""
    return secrets.token_hex(8)


def exit_code(directory: Path, run_id: str) -> int | None:
    """Return the exit code of the controller of that id; None if it has not ended.

    Errors: `RendezvousError`, as for `ControllerAddress.read`.
    """
    fields = read_private(directory / EXIT_FILE)
    if fields is None or fields.get("run_id") != run_id:
        return None
    return int(fields["code"])


def write_private(path: Path, fields: Mapping[str, Any]) -> None:
    """Write JSON that only this user can read: complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_private(path: Path) -> dict[str, Any] | None:
    """Read what `write_private` wrote; None if there is no file. Errors: `RendezvousError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RendezvousError(f"{path} cannot be read ({error}); remove it") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise RendezvousError(
                f"{path} is of user {status.st_uid}, and this is user {os.geteuid()}; choose a "
                "directory of your own"
            )
        if status.st_mode & 0o077:
            raise RendezvousError(
                f"{path} has mode {status.st_mode & 0o777:o}, so others may know what is in it; "
                "remove it"
            )
        text = file.read()
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise RendezvousError(f"{path} is not complete ({error}); remove it") from error
    if not isinstance(fields, dict):
        raise RendezvousError(f"{path} holds {type(fields).__name__}, not an object; remove it")
    return fields
