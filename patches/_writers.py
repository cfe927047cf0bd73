"""Mends the processes that write asynchronous checkpoints, Megatron's own and the extension's."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import threading
import time
from typing import Any

from ._case import Fault, Original
from ._checkpoints import NOT_SAVED

_QUEUES = ("queue", "preload_q", "comp_q")


def _queue(caller: Any, name: str) -> Any:
    """Return one of a caller's queues, which from 0.17 on are its class's."""
    shared = f"_persistent_{name}"
    return getattr(caller, shared if hasattr(caller, shared) else name)


def _gone(caller: Any) -> str | None:
    """Say why the caller's process will not answer; None if it may."""
    process = caller.process
    if process is None:
        return None
    if not process.is_alive():
        return f"the process {process.pid} that writes checkpoints ended with {process.exitcode}"
    unsent = vars(_queue(caller, "queue")).get("unsent")
    return unsent and f"a save could not be sent to the process that writes checkpoints: {unsent}"


def _drop(caller: Any) -> None:
    """Forget a caller's process and queues, so that the next save starts others."""
    for name in _QUEUES:
        _queue(caller, name).cancel_join_thread()  # what it holds has no reader
    caller.process.kill()
    lost = ("process", "cur_item", "asked", *_QUEUES)
    given = {name: value for name, value in vars(caller).items() if name not in lost}
    type(caller).__init__(caller)
    vars(caller).update(given)
    for name in ("process", *_QUEUES):
        if hasattr(type(caller), shared := f"_persistent_{name}"):
            setattr(type(caller), shared, None)
    for forget in getattr(caller, "_worker_restart_callbacks", ()):  # what the process had cached
        forget()


def _look(caller: Any) -> None:
    """Take what the process has said; forget the process if it will not say any more."""
    gone = _gone(caller)  # before: what it has written by then counts
    with contextlib.suppress(queue.Empty):
        if caller.process and caller.cur_item is None:
            to_write = next(iter(vars(caller).get("asked", ())), True)
            caller.cur_item = _queue(caller, "comp_q").get_nowait() if to_write else -1
    if gone and caller.cur_item is None:
        _drop(caller)
        caller.lost = RuntimeError(gone)


def _unsent(requests: Any, error: Exception, item: Any) -> None:
    requests.unsent = f"{type(error).__name__}: {error}"


def _join(caller: Any, prepared: Any) -> None:
    """Wait until the process has taken what is in the queue, or will not."""
    waiting = threading.Thread(target=type(prepared).join, args=(prepared,), daemon=True)
    waiting.start()
    while waiting.is_alive() and not _gone(caller):
        waiting.join(0.1)


def schedule_async_call(original: Original, self: Any, async_req: Any) -> None:
    """Give the request to the process, unless it is gone: the next wait says so."""
    import torch

    _look(self)
    if "lost" in vars(self):
        return
    vars(self).setdefault("asked", []).append(async_req.async_fn is not None)
    if async_req.async_fn is None:  # this rank has nothing to write
        return
    if self.process is None and hasattr(self, "_get_process"):
        self.process = self._get_process(torch.distributed.get_rank())
    requests, prepared = _queue(self, "queue"), _queue(self, "preload_q")
    requests._on_queue_feeder_error = functools.partial(_unsent, requests)
    prepared.join = functools.partial(_join, self, prepared)
    original(self, async_req)


def is_current_async_call_done(
    original: Original, self: Any, blocking: bool = False, no_dist: bool = False
) -> Any:
    """Tell whether all ranks have written; raise on all if one's process never will."""
    from megatron_idempotent.window import agreement

    _look(self)
    while blocking and self.process and self.cur_item is None:
        time.sleep(0.1)
        _look(self)
    done = original(self, blocking, no_dist)
    if not done:
        return done
    del vars(self).get("asked", [])[:1]
    lost = vars(self).pop("lost", None)
    try:
        if no_dist and lost:
            raise lost
        with agreement.as_one(NOT_SAVED):
            agreement.meet(NOT_SAVED, lost)
    except RuntimeError:
        if self.process:
            _drop(self)
        self.aborted, self.asked = True, []
        raise
    return done


def maybe_finalize_async_calls(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Finalize saves that are written; forget all of them if one's process is gone."""
    try:
        return original(self, *args, **kwargs)
    except RuntimeError:
        if self.async_calls and vars(self.async_calls[0].async_caller).pop("aborted", False):
            self.async_calls.clear()
            package = type(self).__module__.rpartition(".")[0]
            results = importlib.import_module(f"{package}.filesystem_async")._results_queue
            while results is not None and not results.empty():
                results.get_nowait()
        raise


def close(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """End the process, or forget it if it will not answer."""
    if _gone(self):
        _drop(self)
    else:
        original(self, *args, **kwargs)


def _end() -> None:
    os._exit(3)


def ends(module: Any) -> None:
    """Have the writer of rank 1 end, and ask for its save; then save again, and there nothing."""
    import torch

    rank, saves = torch.distributed.get_rank(), module.AsyncCallsQueue(persistent=True)
    saves.schedule_async_request(module.AsyncRequest(_end if rank else os.getpid, (), []))
    caller = saves.async_calls[0].async_caller
    process = caller.process
    if rank:
        process.join()
    while not rank and _queue(caller, "comp_q").empty():
        time.sleep(0.1)  # it has not written
    torch.distributed.barrier()
    try:
        finished = saves.maybe_finalize_async_calls()
    except RuntimeError as error:
        if "ended with 3" not in str(error):
            raise
    else:
        process.kill()
        caller.process = None  # closing would hang
        raise Fault(f"the writer of rank 1 has ended, and rank {rank} finds {finished}")
    for write in (os.getpid, None if rank else os.getpid):
        saves.schedule_async_request(module.AsyncRequest(write, (), []))
        if len(saves.maybe_finalize_async_calls(blocking=True)) != 1:
            raise Fault("a later save is not finalized")
    saves.close()


def lives(module: Any) -> object:
    """Finalize a save for which rank 1 has nothing to write, then two that take a while."""
    import torch

    saves = module.AsyncCallsQueue(persistent=True)
    ended: list[int] = []
    for index in range(3):
        done = [functools.partial(ended.append, index)]
        write = time.sleep if index or torch.distributed.get_rank() == 0 else None
        saves.schedule_async_request(module.AsyncRequest(write, (0.2,), done))
        if index != 1:
            ended += saves.maybe_finalize_async_calls(blocking=True)
    saves.close()
    return ended
