"""Makes saves and loads fail as on bad disks: no room, files missing or cut, no handles, delays."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import mmap
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_idempotent.proof.cpu.launcher import unserved_s

if TYPE_CHECKING:
    from .states import States


def attempt(function: Callable[..., Any], *args: Any) -> tuple[str | None, Any]:
    """Call a function; return (None, its result), or (the error in one line, None) if it raises."""
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    try:
        return None, function(*args)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  any error is a result
        return f"{type(error).__name__}: {first_line(error)}", None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; of a `CheckpointException`, that of the first
    failed rank's error.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        for rank, (cause, _) in error.failures.items():
            return f"on rank {rank} {type(cause).__name__}: {cause}".splitlines()[0]
    return (str(error).splitlines() or [""])[0]


def _replace(blocks: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of `owner`, and register with the exit stack `blocks` that the old value is
    put back when the stack closes.
    """
    blocks.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextlib.contextmanager
def _limited(limit: int, number: int, *, yes: bool) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    if yes:
        resource.setrlimit(limit, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


@contextlib.contextmanager
def no_room(room: int, *, yes: bool, forked: bool = False) -> Iterator[None]:
    """Limit each written file to `room` bytes within the block, so that writes fail as on a full
    disk; with `yes=False` limit nothing.

    This process and its children are limited. With `yes=False` nothing is. With `forked` the limit
    is on processes forked in the block alone, because locks are files, too. The error is `OSError`
    (EFBIG). What the block prints is dropped: it may go to a file.
    """
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as blocks:
        if yes:
            blocks.enter_context(contextlib.redirect_stdout(nowhere))
            blocks.enter_context(contextlib.redirect_stderr(nowhere))
        if yes and 0x030C0000 <= sys.hexversion < 0x030C0200:
            # These releases crash when they collect what a failed write leaves
            # (https://github.com/python/cpython/issues/111049): they collect nothing here.
            gc.disable()
            blocks.callback(gc.enable)
            blocks.callback(gc.freeze)
        if forked:
            fork = os.fork

            def limited() -> int:
                pid = fork()
                if yes and pid == 0:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
                return pid

            _replace(blocks, os, "fork", limited)
        else:
            blocks.enter_context(_limited(resource.RLIMIT_FSIZE, room, yes=yes))
        yield


class SlowDisk:
    """Delays a save's background threads and processes until `release`, as a slow disk would. The
    check's own thread is not delayed.

    Args:
        folder: the folder of the checkpoints; files elsewhere are written at once.
    """

    #: The longest delay of a write after the save has returned, and before.
    _LONGEST_S, _LONGEST_WITHIN_SAVE_S = 20.0, 1.0

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._process, self._thread = os.getpid(), threading.get_ident()
        # Anonymous memory, which processes that are forked later share.
        self._has_returned, self._is_released = (mmap.mmap(-1, 1) for _ in range(2))
        self._starts = contextlib.ExitStack()

    def hold_starts(self) -> None:
        """Delay the start of each new thread, and of each call submitted to a thread pool, from now
        until `returned` is called.

        Their whole work is late then, and not the writing alone.
        """
        submit = ThreadPoolExecutor.submit

        def submit_late(
            executor: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            def late() -> Any:
                self.hold()
                return function(*args, **kwargs)

            return submit(executor, late)

        def before_first_call(*_: Any) -> None:
            sys.setprofile(None)
            self.hold()

        _replace(self._starts, ThreadPoolExecutor, "submit", submit_late)
        self._starts.callback(threading.setprofile, threading.getprofile())
        threading.setprofile(before_first_call)

    def returned(self) -> None:
        """Note that the saving call has returned; threads that start later are not delayed at their
        start.
        """
        self._starts.close()
        self._has_returned[0] = 1

    def release(self) -> None:
        """End all delays: threads and processes that `hold` blocks go on."""
        self._is_released[0] = 1

    def hold(self) -> None:
        """Block the calling thread or process until `release`, for at most 1 s while the saving
        call runs, and 20 s once it has returned.
        """
        begun_s = time.monotonic()
        while not self._is_released[0]:
            has_returned = self._has_returned[0]
            longest_s = self._LONGEST_S if has_returned else self._LONGEST_WITHIN_SAVE_S
            if time.monotonic() >= begun_s + longest_s:
                break
            time.sleep(0.01)

    def hold_process(self) -> None:
        """Delay the calling process if it is not the one that made this object, as after a fork."""
        if os.getpid() != self._process:
            self.hold()

    def hold_file(self, path: Any) -> None:
        """Delay the calling thread if `path` is in the checkpoint folder, and the thread is not the
        check's own.
        """
        if (
            os.getpid() == self._process
            and threading.get_ident() != self._thread
            and isinstance(path, (str, os.PathLike))
            and os.fspath(path).startswith(self._folder)
        ):
            self.hold()


_slow_disks: list[SlowDisk] = []


@functools.cache
def _watch_files() -> None:
    """Install an audit hook in this process, at the first call only. While a `slow_disk` block is
    active, the hook delays threads of a save that open checkpoint files for writing.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _slow_disks:
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR):
                _slow_disks[-1].hold_file(path)

    sys.addaudithook(hook)  # for the life of the process: there is no way to remove one


@contextlib.contextmanager
def slow_disk(bench: States) -> Iterator[SlowDisk]:
    """Delay file writes of other threads and of forked processes in the block; yield the
    `SlowDisk`.

    The check calls `returned` as soon as the saving call has returned, and may call `release`
    before the end of the block.
    """
    import torch

    disk, sync, save = SlowDisk(bench.folder), os.fsync, torch.save
    _watch_files()

    def fsync(file: Any) -> None:
        disk.hold_process()
        sync(file)

    def save_late(state: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        disk.hold_file(f)  # torch opens a file by its name in C++
        save(state, f, *args, **kwargs)

    with contextlib.ExitStack() as blocks:
        blocks.callback(disk.release)
        blocks.callback(disk.returned)
        _replace(blocks, os, "fsync", fsync)
        _replace(blocks, torch, "save", save_late)
        _slow_disks.append(disk)
        blocks.callback(_slow_disks.remove, disk)
        disk.hold_starts()
        yield disk


LONGEST_S = 20.0
"""Seconds after which a call that a check makes fail has hung.

Time in which ranks wait for a processor does not count, up to three times as many seconds."""
_STUCK = "stuck-"


@contextlib.contextmanager
def ending_hangs(bench: States, reason: str) -> Iterator[None]:
    """Kill this rank's process if the block takes longer than `LONGEST_S`. Before that, write
    `reason` and the stacks of this process's threads to a file, which `stuck` reads.

    A collective would wait for ever for a rank that does not join it. All ranks enter.
    """
    ranks: list[int] = bench.gather(os.getpid())
    ended, begun_s = threading.Event(), time.monotonic()
    unserved_before_s = sum(map(unserved_s, ranks))

    def watch() -> None:
        while not ended.wait(0.2):
            late_s = time.monotonic() - begun_s - LONGEST_S
            if late_s >= 0.0 and late_s >= min(
                3 * LONGEST_S, sum(map(unserved_s, ranks)) - unserved_before_s
            ):
                _write_note(bench.root / f"{_STUCK}{bench.rank}", reason)
                os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _write_note(path: Path, reason: str) -> None:
    """Write a reason and the stacks of all threads to a file, after lifting this process's file
    limits.
    """
    _slow_disks.clear()
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))
    with path.open("w") as file:
        file.write(f"{reason} after {LONGEST_S:g} s\n")
        file.flush()
        faulthandler.dump_traceback(file)


def stuck(folder: Path) -> tuple[int, str, str] | None:
    """Return the first rank that `ending_hangs` killed, the reason, and the rank's stacks; None if
    `ending_hangs` killed no rank.
    """
    for note in sorted(folder.glob(f"{_STUCK}*")):
        reason, _, stacks = note.read_text(encoding="utf-8").partition("\n")
        return int(note.name.removeprefix(_STUCK)), reason, stacks
    return None


@contextlib.contextmanager
def _unreadable(bench: States, path: Path) -> Iterator[str]:
    """Make the last rank unable to open files within the block (EMFILE); yield a description of
    this fault.
    """
    rank = bench.ranks - 1
    with _limited(resource.RLIMIT_NOFILE, 3, yes=bench.rank == rank):
        yield f"rank {rank} cannot open files"


@contextlib.contextmanager
def _cut(bench: States, path: Path, *, share: float | None = None) -> Iterator[str]:
    """Truncate a file to the fraction `share` of its size, or remove it if `share` is None; yield a
    description of this fault. The file is restored after the block.
    """
    content = path.read_bytes()
    bench.gather(None)
    if bench.rank == 0:
        if share is None:
            path.unlink()
        else:
            path.write_bytes(content[: int(len(content) * share)])
    bench.gather(None)
    yield (
        f"{path.name} is empty"
        if share == 0
        else f"{'half of ' if share else ''}{path.name} is missing"
    )
    if bench.rank == 0:
        path.write_bytes(content)
    bench.gather(None)


LATER = "later.pt"
"""The ending of files that saving ranks leave for loading ranks; no checkpoint uses it."""


Stamps = Mapping[Path, tuple[int, int]]
"""Maps files to the time of their last change, in nanoseconds, and their size in bytes."""


def stamps(bench: States) -> Stamps:
    """Return, for each checkpoint file's path, the time of its last change in ns, and its size in
    bytes. A collective.
    """
    bench.gather(None)  # all have written
    files = [path for path in bench.folder.rglob("*") if not path.name.endswith(LATER)]
    stats = {path: path.stat() for path in files if path.is_file()}
    return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


def saved_files(bench: States, older: Stamps = MappingProxyType({})) -> list[tuple[int, Path]]:
    """Group the checkpoint files whose names differ only in digits; return (size, path) of the
    largest file of each group, sorted by size, the largest first.

    The second entry is another file of the first file's group, such as another rank's, if there is
    one. A file that is unchanged since `older` is returned only if its group has no changed file. A
    collective: all ranks get rank 0's list.
    """
    files = sorted(
        (older.get(path) != (changed_ns, size), size, path)
        for path, (changed_ns, size) in stamps(bench).items()
    )
    largest = {_kind_of(path): (size, path) for _, size, path in files}
    ordered = sorted(largest.values(), reverse=True)
    siblings = [
        (size, path)
        for is_new, size, path in files
        if is_new
        and ordered
        and _kind_of(path) == _kind_of(ordered[0][1])
        and path != ordered[0][1]
    ]
    everybody: list[list[tuple[int, Path]]] = bench.gather(
        [*ordered[:1], *siblings[:1], *ordered[1:]]
    )
    return everybody[0]


def _kind_of(path: Path) -> str:
    return re.sub("[0-9]+", "", path.name)


@contextlib.contextmanager
def no_memory(calls_before: float) -> Iterator[list[str]]:
    """Make copies and moves of tensors in the block raise `MemoryError`, from the copy or move
    after the first `calls_before` on.

    Yield a list that gets the name of each call.
    """
    import torch

    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > calls_before:
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
        "file-missing": _cut,
        "file-truncated": functools.partial(_cut, share=0.5),
        "file-empty": functools.partial(_cut, share=0.0),
        "rank-cannot-read": _unreadable,
    }
)
"""Maps faults to blocks in which a checkpoint with that file cannot be loaded; each yields why."""
