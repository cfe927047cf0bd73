"""Lets saves and loads fail as disks and machines do: no room, files missing or cut, no handles."""

from __future__ import annotations

import contextlib
import gc
import os
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
def no_room(*, yes: bool) -> Iterator[None]:
    """Refuse inside of the block to write into files, of this process and what it starts.

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
        blocks.enter_context(_limited(resource.RLIMIT_FSIZE, 0, yes=yes))
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
def _missing(bench: States, path: Path) -> Iterator[str]:
    """Move the file away."""
    aside = bench.folder / "aside"
    if bench.rank == 0:
        path.rename(aside)
    bench.told_by_all(None)
    yield f"{path.name} is missing"
    if bench.rank == 0:
        aside.rename(path)
    bench.told_by_all(None)


@contextlib.contextmanager
def _truncated(bench: States, path: Path) -> Iterator[str]:
    """Leave half of the file."""
    whole = path.read_bytes()
    bench.told_by_all(None)
    if bench.rank == 0:
        path.write_bytes(whole[: len(whole) // 2])
    bench.told_by_all(None)
    yield f"half of {path.name} is missing"
    if bench.rank == 0:
        path.write_bytes(whole)
    bench.told_by_all(None)


LATER = "later.pt"
"""Ends the names of files that ranks that save leave for those that load; no checkpoint has it."""


def largest_file(bench: States) -> Path | None:
    """Return the largest file of what was saved; None if there is none.

    All ranks take part.
    """
    there = [path for path in bench.folder.rglob("*") if not path.name.endswith(LATER)]
    files = [path for path in there if path.is_file()]
    found = max(files, key=lambda path: (path.stat().st_size, path), default=None)
    everybody: list[Path | None] = bench.told_by_all(found)
    return everybody[0]


SPOILT: Mapping[str, Callable[[States, Path], Any]] = MappingProxyType(
    {
        "file-missing": _missing,
        "file-truncated": _truncated,
        "rank-cannot-read": _unreadable,
    }
)
"""Blocks in which a checkpoint with this file cannot be loaded; each says why."""
