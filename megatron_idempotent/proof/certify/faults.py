"""Lets saves and loads fail as disks and machines do: no room, files missing or cut, no handles."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .states import States


def attempt(function: Callable[..., Any], *args: Any) -> tuple[str | None, Any]:
    """Return what a call raised, in one line, or None and what it returned."""
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    try:
        return None, function(*args)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  it is what is asked for
        return f"{type(error).__name__}: {said(error)}", None


def said(error: BaseException) -> str:
    """Return an error's text in one line; of one that collects those of ranks, the first's."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        for rank, (cause, _) in error.failures.items():
            return f"on rank {rank} {type(cause).__name__}: {cause}".splitlines()[0]
    return (str(error).splitlines() or [""])[0]


@contextlib.contextmanager
def _limited(what: int, number: int, *, yes: bool) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    if yes:
        resource.setrlimit(what, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@contextlib.contextmanager
def no_room(room: int, *, yes: bool, forked: bool = False) -> Iterator[None]:
    """Refuse inside of the block more than `room` bytes of a file, of this process and its own.

    With `forked` it is refused to processes that are forked there alone: locks are files as well.

    The error is `OSError` (EFBIG). What is printed meanwhile is dropped: it may go to a file too.
    """
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as blocks:
        if yes:
            blocks.enter_context(contextlib.redirect_stdout(nowhere))
            blocks.enter_context(contextlib.redirect_stderr(nowhere))
        if yes and 0x030C0000 <= sys.hexversion < 0x030C0200:
            # These crash in the collector on what a failed write leaves
            # (https://github.com/python/cpython/issues/111049): let nothing be collected of it.
            gc.disable()
            blocks.callback(gc.enable)
            blocks.callback(gc.freeze)
        if forked:
            fork = os.fork
            blocks.callback(setattr, os, "fork", fork)

            def limited() -> int:
                pid = fork()
                if yes and pid == 0:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
                return pid

            os.fork = limited
        else:
            blocks.enter_context(_limited(resource.RLIMIT_FSIZE, room, yes=yes))
        yield


@contextlib.contextmanager
def slow_disk(bench: States) -> Iterator[None]:
    """Let no process that is forked inside of the block have written a file before its end."""
    ended, rank, sync = bench.folder / f"{bench.rank}-ended", os.getpid(), os.fsync
    ended.unlink(missing_ok=True)

    def fsync(file: Any) -> None:
        waits_until_s = time.monotonic() + 20  # for a save that waits for its writer itself
        while os.getpid() != rank and not ended.exists() and time.monotonic() < waits_until_s:
            time.sleep(0.01)
        sync(file)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = sync
        ended.touch()


@contextlib.contextmanager
def _unreadable(bench: States, path: Path) -> Iterator[str]:
    """Refuse to open files on the last rank (EMFILE)."""
    rank = bench.ranks - 1
    with _limited(resource.RLIMIT_NOFILE, 3, yes=bench.rank == rank):
        yield f"rank {rank} cannot open files"


@contextlib.contextmanager
def _cut(bench: States, path: Path, *, parts: int) -> Iterator[str]:
    """Leave one of so many parts of the file; nothing at all, not even its name, without parts."""
    content = path.read_bytes()
    bench.told_by_all(None)
    if bench.rank == 0:
        path.write_bytes(content[: len(content) // parts]) if parts else path.unlink()
    bench.told_by_all(None)
    yield f"{'half of ' if parts else ''}{path.name} is missing"
    if bench.rank == 0:
        path.write_bytes(content)
    bench.told_by_all(None)


LATER = "later.pt"
"""Ends the names of files that ranks that save leave for those that load; no checkpoint has it."""


def saved_files(bench: States) -> list[tuple[int, Path]]:
    """Return bytes and path of what was saved: the largest file of each kind of name, in order.

    Names are of one kind if they differ in numbers. All ranks take part.
    """
    bench.told_by_all(None)  # all have written
    there = [path for path in bench.folder.rglob("*") if not path.name.endswith(LATER)]
    files = sorted((path.stat().st_size, path) for path in there if path.is_file())
    largest = {re.sub("[0-9]+", "", path.name): (size, path) for size, path in files}
    everybody: list[list[tuple[int, Path]]] = bench.told_by_all(sorted(largest.values()))
    return everybody[0][::-1]


@contextlib.contextmanager
def no_memory(after: float) -> Iterator[list[str]]:
    """Refuse to copy or move a tensor after so many; yield the names of the calls so far.

    The error is `MemoryError`.
    """
    import torch

    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > after:
                raise MemoryError("the host has no memory left, as the check asks")
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as blocks:
        for name in ("cpu", "to", "copy_", "pin_memory", "resize_"):
            for kind in (torch.Tensor, torch.UntypedStorage):
                if function := getattr(kind, name, None):
                    is_own = name in vars(kind)
                    setattr(kind, name, counted(name, function))
                    undo = (setattr, kind, name, function) if is_own else (delattr, kind, name)
                    blocks.callback(*undo)
        yield calls


SPOILT: Mapping[str, Callable[[States, Path], Any]] = MappingProxyType(
    {
        "file-missing": functools.partial(_cut, parts=0),
        "file-truncated": functools.partial(_cut, parts=2),
        "rank-cannot-read": _unreadable,
    }
)
"""Blocks in which a checkpoint with this file cannot be loaded; each says why."""
