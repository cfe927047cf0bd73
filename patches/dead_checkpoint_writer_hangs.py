"""An asynchronous save whose persistent writer dies, or gets no request, is waited for without end.

Symptom:
    With `--async-save --use-persistent-ckpt-worker` the process that writes is killed, such as for
    want of memory, or raises. The trainer asks it again at each iteration, makes no more
    checkpoints and says nothing; at the next save, or at its end, it hangs. So it does where a
    request cannot be sent, such as by a rank without a free file descriptor: only a thread's
    traceback tells of it.

Cause:
    `PersistentAsyncCaller` waits for what the process puts into queues, in
    `is_current_async_call_done`, where it hands over tensors, and in `close`. Nobody looks whether
    the process lives, nor whether the queue's thread could send.

Affects:
    Every release, with Megatron's own worker (`--async-strategy mcore`). What the patch does: a
    writer that has ended is found when the trainer next asks. Once all ranks have heard of their
    writers, all raise, with its exit code. The save counts as none, and the next one starts another
    process; so does a save that finds its writer dead. It costs two exchanges of a few bytes per
    save. With `no_dist` a rank raises alone.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/dist_checkpointing/strategies/async_utils.py,
    `PersistentAsyncCaller`; no thread found.

Remove when:
    `maybe_finalize_async_calls` raises on all ranks where a persistent writer has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from typing import Any

from ._case import Fault, Original, Patch, target
from ._checkpoints import NOT_SAVED


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
    for name in ("queue", "preload_q", "comp_q"):
        _queue(caller, name).cancel_join_thread()  # what it holds has no reader
    caller.process.kill()
    type(caller).__init__(caller)
    for name in ("process", "queue", "preload_q", "comp_q"):
        if hasattr(type(caller), shared := f"_persistent_{name}"):
            setattr(type(caller), shared, None)


def _look(caller: Any) -> None:
    """Take what the process has said; forget the process if it will not say any more."""
    gone = _gone(caller)  # before: what it has written by then counts
    with contextlib.suppress(queue.Empty):
        if caller.process and caller.cur_item is None:
            caller.cur_item = _queue(caller, "comp_q").get_nowait()
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
    lost = vars(self).pop("lost", None)
    try:
        if no_dist and lost:
            raise lost
        with agreement.as_one(NOT_SAVED):
            agreement.meet(NOT_SAVED, lost)
    except RuntimeError:
        if self.process:
            _drop(self)
        self.aborted = True
        raise
    return done


def maybe_finalize_async_calls(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Finalize saves that are written; forget all of them if one's process is gone."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    try:
        return original(self, *args, **kwargs)
    except RuntimeError:
        if self.async_calls and vars(self.async_calls[0].async_caller).pop("aborted", False):
            self.async_calls.clear()
            results = filesystem_async._results_queue
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


def reproduce() -> None:
    """Have the writer of rank 1 end, and ask for its save; then save again."""
    import torch
    from megatron.core.dist_checkpointing.strategies import async_utils

    rank, saves = torch.distributed.get_rank(), async_utils.AsyncCallsQueue(persistent=True)
    saves.schedule_async_request(async_utils.AsyncRequest(_end if rank else os.getpid, (), []))
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
    if saves.schedule_async_request(
        async_utils.AsyncRequest(os.getpid, (), [])
    ) not in saves.maybe_finalize_async_calls(blocking=True):
        raise Fault("a later save is not finalized")
    saves.close()


def neighbour() -> object:
    """Finalize two saves, whose writer takes a while."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    saves = async_utils.AsyncCallsQueue(persistent=True)
    ended: list[int] = []
    for index in range(2):
        done = [functools.partial(ended.append, index)]
        saves.schedule_async_request(async_utils.AsyncRequest(time.sleep, (0.2,), done))
    ended += saves.maybe_finalize_async_calls(blocking=True)
    saves.close()
    return ended


_UTILS = "core.dist_checkpointing.strategies.async_utils"
PATCH = Patch(
    "an asynchronous save whose persistent writer has ended is waited for without end",
    target(f"{_UTILS}:PersistentAsyncCaller.schedule_async_call", schedule_async_call),
    target(
        f"{_UTILS}:PersistentAsyncCaller.is_current_async_call_done", is_current_async_call_done
    ),
    target(f"{_UTILS}:PersistentAsyncCaller.close", close),
    target(f"{_UTILS}:AsyncCallsQueue.maybe_finalize_async_calls", maybe_finalize_async_calls),
    needs=("psutil",),
)
