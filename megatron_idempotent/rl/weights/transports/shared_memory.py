"""Sends buckets through POSIX shared memory, to workers on the trainer's machine."""

from __future__ import annotations

import os
import pathlib
import resource
import secrets
from collections.abc import Mapping
from multiprocessing import resource_tracker
from typing import Any

import torch

from megatron_idempotent.rl.weights.records import Bucket, UpdateDamaged, WeightUpdate, field

from .base import Announcement, Receiver, Sender, TransportError, TwoSegments
from .layout import REMEDY, BucketLayout, read_bucket

#: Where Linux exposes POSIX shared memory as files.
DIRECTORY = pathlib.Path("/dev/shm")
PREFIX = "megatron-idempotent"
#: Segment sizes are multiples of this, so that buckets of similar size fit the same segment.
_GRAIN = 1 << 21


class Segment:
    """A segment of POSIX shared memory that this process has allocated; its name contains the
    process's id and start time.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate a segment of at least `nbytes`.

        Raises:
            TransportError: there is not enough shared memory.
        """
        self.nbytes = max(1, -(-nbytes // _GRAIN)) * _GRAIN
        self.name = f"{PREFIX}.{_namespace()}.{os.getpid()}.{_started(os.getpid())}"
        self.name += f".{secrets.token_hex(4)}"
        # The standard library's tracker unlinks the segment if this process is killed. Registered
        # by hand, because `SharedMemory` unregisters a name that was never registered if allocation
        # fails.
        resource_tracker.register(f"/{self.name}", "shared_memory")
        try:
            with open(DIRECTORY / self.name, "xb", opener=_private) as file:
                # Without this, a write while /dev/shm is full kills the process (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
            self.flat_N = torch.from_file(
                str(DIRECTORY / self.name), shared=True, size=self.nbytes, dtype=torch.uint8
            )
        except (OSError, RuntimeError) as error:
            self._forget()
            free = os.statvfs(DIRECTORY)
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            limit = "" if most < 0 else f", and files of at most {most / 1e6:.0f} MB (ulimit -f)"
            raise TransportError(
                f"no room for a segment of {self.nbytes / 1e6:.0f} MB in {DIRECTORY}, which has "
                f"{free.f_bavail * free.f_frsize / 1e6:.0f} MB free{limit}: {error}; send smaller "
                "buckets, raise the limit, or give the container more (--shm-size)"
            ) from error

    def announced(self) -> Mapping[str, Any]:
        """Return the JSON with which a receiver opens the segment: its name and size."""
        return {"segment": self.name, "segment_bytes": self.nbytes}

    def unlink(self) -> None:
        """Unlink the segment's name; the memory is freed when the last process closes it."""
        del self.flat_N
        self._forget()

    def _forget(self) -> None:
        # Missing if creating it failed, or if an administrator removed it.
        (DIRECTORY / self.name).unlink(missing_ok=True)
        resource_tracker.unregister(f"/{self.name}", "shared_memory")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def remove_stale_segments() -> tuple[str, ...]:
    """Unlink the shared-memory segments of trainers that have died on this machine; return their
    names.

    Segments of other PID namespaces (containers that share /dev/shm) are kept, because their
    processes are not visible.
    """
    removed = []
    for path in sorted(DIRECTORY.glob(f"{PREFIX}.*")):
        if not _is_stale(path.name):
            continue
        try:
            path.unlink()
        except (FileNotFoundError, PermissionError):
            continue  # another user's, or removed meanwhile
        removed.append(path.name)
    return tuple(removed)


def _is_stale(name: str) -> bool:
    parts = name.split(".")
    if len(parts) != 5 or not all(part.isdecimal() for part in parts[1:4]):
        return False
    namespace, pid, started = (int(part) for part in parts[1:4])
    return namespace == _namespace() and _started(pid) != started


def _namespace() -> int:
    """Return the id of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if the process is dead or a
    zombie.

    A segment's name has the start time in addition to the PID, because PIDs are reused.
    """
    try:
        # The second field, the program's name in brackets, may contain spaces and brackets.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


KIND = "shared_memory"


class SharedMemorySender(Sender):
    """Sends each bucket in a segment of POSIX shared memory, which all workers read; two segments
    alternate.

    A bucket occupies its segment until `release(bucket)`, so at most two buckets are in transit.
    `open()` also removes the segments of dead trainers.
    """

    kind = KIND

    def _begin(self, update: WeightUpdate) -> tuple[TwoSegments, Mapping[str, Any]]:
        if not DIRECTORY.is_dir():
            raise TransportError(
                f"there is no {DIRECTORY}, so no shared memory; use DiskSender or "
                "ProcessGroupSender"
            )
        remove_stale_segments()
        return TwoSegments(update.id, make=Segment), {}


class SharedMemoryReceiver(Receiver):
    """Copies buckets from the trainer's segments of POSIX shared memory into new tensors on the
    host.

    It opens segments as files. `multiprocessing.shared_memory` would register them with this
    process's resource tracker, which before Python 3.13 unlinks the trainer's segments when this
    process ends.
    """

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        subject = f"update {self._update_id}: bucket {layout.index}"
        name: str = field(announced, "segment", str, subject, REMEDY)
        if not name.startswith(f"{PREFIX}.") or {"/", "\0"} & set(name):
            raise UpdateDamaged(f"update {self._update_id}: {name!r} is not a trainer's segment")
        return read_bucket(
            DIRECTORY / name,
            layout,
            file_bytes=field(announced, "segment_bytes", int, subject, REMEDY),
            offsets_in=lambda _: layout.offsets,
        )
