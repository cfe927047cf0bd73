"""Repairs the callers of processes that write checkpoints, Megatron's and the extension's."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ._case import Fault, Original, once_there
from ._checkpoints import NOT_SAVED

_QUEUES = ("queue", "preload_q", "comp_q")


def _queue(caller: Any, name: str) -> Any:
    """Return one of the queues between an async-save caller and its writer process, by name.
    From 0.17 on they are class attributes of Megatron's caller.
    """
    shared = f"_persistent_{name}"
    return getattr(caller, shared if hasattr(caller, shared) else name)


def _reason_lost(caller: Any) -> str | None:
    """Return why an async-save caller's writer process will never report a result.
    None if it may still report.
    """
    process = caller.process
    if process is None:
        return None
    if not process.is_alive():
        return f"the process {process.pid} that writes checkpoints ended with {process.exitcode}"
    unsent = vars(_queue(caller, "queue")).get("unsent")
    return unsent and f"a save could not be sent to the process that writes checkpoints: {unsent}"


def _drop(caller: Any) -> None:
    """Kill an async-save caller's writer process, and remove its queues from the caller.
    The next save starts a new process and new queues.
    """
    for name in _QUEUES:
        _queue(caller, name).cancel_join_thread()  # its items have no reader any more
    caller.process.kill()
    lost = ("process", "cur_item", "asked", *_QUEUES)
    attributes = {name: value for name, value in vars(caller).items() if name not in lost}
    type(caller).__init__(caller)
    vars(caller).update(attributes)
    for name in ("process", *_QUEUES):
        if hasattr(type(caller), shared := f"_persistent_{name}"):
            setattr(type(caller), shared, None)
    _forget_cached(caller)


def _forget_cached(caller: Any) -> None:
    """Make the next save send all of its data to the new writer process: part of the data was
    cached in the killed one.

    Do nothing for Megatron's own caller, whose writer process caches no data. The caller of
    nvidia-resiliency-ext has a list of callbacks for this.
    """
    for forget in getattr(caller, "_worker_restart_callbacks", ()):
        forget()


def _look(caller: Any) -> None:
    """Read the writer process's report from the queue, if there is one.
    If the process will never report, kill it, and store the error as `caller.lost`.
    """
    reason = _reason_lost(caller)  # before the queue is read: what it had written still counts
    with contextlib.suppress(queue.Empty):
        if caller.process and caller.cur_item is None:
            to_write = next(iter(vars(caller).get("asked", ())), True)
            caller.cur_item = _queue(caller, "comp_q").get_nowait() if to_write else -1
    if reason and caller.cur_item is None:
        _drop(caller)
        caller.lost = RuntimeError(reason)


def _unsent(requests: Any, error: Exception, item: Any) -> None:
    requests.unsent = f"{type(error).__name__}: {error}"


def _join(caller: Any, prepared: Any) -> None:
    """Wait until the writer process has taken all items from the queue `prepared`.
    Return early if the process is lost, and can no longer take items.
    """
    waiting = threading.Thread(target=type(prepared).join, args=(prepared,), daemon=True)
    waiting.start()
    while waiting.is_alive() and not _reason_lost(caller):
        waiting.join(0.1)


def schedule_async_call(original: Original, self: Any, async_req: Any) -> None:
    """Wrap the start of an asynchronous save: give the request to the writer process.
    If that process is lost, do nothing; the next check for the end of the save raises.
    """
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
    """Return whether all ranks have written; raise on all ranks if a writer process is lost."""
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
        if not no_dist:
            with agreement.as_one(NOT_SAVED):
                agreement.meet(NOT_SAVED, lost)
        elif lost:
            raise lost
    except RuntimeError:
        if self.process:
            _drop(self)
        self.aborted, self.asked = True, []
        raise
    return done


def maybe_finalize_async_calls(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Finalize the saves that are written.
    If a writer process is lost, drop all saves that are not finalized, and raise.
    """
    try:
        return original(self, *args, **kwargs)
    except RuntimeError:
        if self.async_calls and vars(self.async_calls[0].async_caller).pop("aborted", False):
            _forget(self)
        raise


def _forget(saves: Any) -> None:
    """Drop the saves that are not finalized, and all results in the module's results queue."""
    saves.async_calls.clear()
    package = type(saves).__module__.rpartition(".")[0]
    results = importlib.import_module(f"{package}.filesystem_async")._results_queue
    while results is not None and not results.empty():
        results.get_nowait()


def abort_all(original: Original, self: Any, abort: bool = False) -> None:
    """Wrap the `close` of a queue of asynchronous saves. With `abort`, also drop the queued saves
    and their results, so that later saves do not get them.
    """
    processes = [call.async_caller.process for call in self.async_calls]
    original(self, abort)
    if abort and self.persistent:
        for process in filter(None, processes):
            process.join()  # it may be about to report a result
        self.persistent_caller = None  # until 0.16 it kept requests that no process had taken
        _forget(self)


def close(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the closing of a writer process: if it will never report, kill it and drop its queues.
    Close any other process as upstream does.
    """
    if _reason_lost(self):
        _drop(self)
    else:
        original(self, *args, **kwargs)
        _forget_cached(self)


def drain(saves: Any) -> None:
    """Wait until this rank's writer process has written all requests, or can no longer do so."""
    if caller := saves.persistent_caller:
        _join(caller, _queue(caller, "queue"))


def _end() -> None:
    os._exit(3)


def lose(module: Any, saves: Any) -> None:
    """Schedule a save in which rank 0's writer process reports, and rank 1's process ends.
    Return when rank 0's report and rank 1's end have happened.
    """
    import torch

    rank = torch.distributed.get_rank()
    saves.schedule_async_request(module.AsyncRequest(_end if rank else os.getpid, (), []))
    caller = saves.async_calls[0].async_caller
    if rank:
        caller.process.join()
    while not rank and _queue(caller, "comp_q").empty():
        time.sleep(0.1)
    torch.distributed.barrier()


def refused(saves: Any, reason: str, *, blocking: bool = False) -> None:
    """Finalize saves whose writer process is lost; raise a `Fault` unless this raises an error.
    The error's text must contain `reason`.
    """
    caller = saves.async_calls[0].async_caller
    try:
        finished = saves.maybe_finalize_async_calls(blocking)
    except RuntimeError as error:
        if reason not in str(error):
            raise
    else:
        caller.process.kill()
        caller.process = None  # closing would hang
        raise Fault(f"a writer is lost, and a rank counts {finished} of its saves as written")


def ends(module: Any) -> None:
    """Run saves in which rank 1's writer process dies, or requests cannot be pickled.
    Raise a `Fault` if an error is not reported, or if a later save is not finalized.
    """
    import torch

    rank, saves = torch.distributed.get_rank(), module.AsyncCallsQueue(persistent=True)
    lose(module, saves)
    refused(saves, "ended with 3")
    bad = (lambda: None) if rank else os.getpid  # which cannot be pickled
    requests: list[Any] = [(bad, (), []), (max, (0, 0), [], {}, bad)]
    for request in requests:
        saves.schedule_async_request(module.AsyncRequest(*request))
        saves.schedule_async_request(module.AsyncRequest(os.getpid, (), []))
        refused(saves, "could not be sent", blocking=True)
    for write in (os.getpid, None if rank else os.getpid):
        saves.schedule_async_request(module.AsyncRequest(write, (), []))
        if len(saves.maybe_finalize_async_calls(blocking=True)) != 1:
            raise Fault("a later save is not finalized")
    saves.close()


def lives(module: Any) -> object:
    """Run four asynchronous saves with writer processes that stay alive, as a control.

    Rank 0 alone writes the first, all ranks write the next two, and whether the last is done is
    asked without a collective. Return the indices of the finished saves, in order, and whether the
    last is done.
    """
    import torch

    rank = torch.distributed.get_rank()
    saves = module.AsyncCallsQueue(persistent=True)
    ended: list[int] = []
    for index in range(3):
        callbacks = [functools.partial(ended.append, index)]
        write = time.sleep if index or rank == 0 else None
        saves.schedule_async_request(module.AsyncRequest(write, (0.2,), callbacks))
        if index != 1:
            ended += saves.maybe_finalize_async_calls(blocking=True)
    saves.schedule_async_request(module.AsyncRequest(os.getpid, (), []))
    if rank:
        torch.distributed.barrier()  # rank 0 reaches it without waiting for this rank
    ended.append(saves.async_calls.pop().async_caller.is_current_async_call_done(True, True))
    if not rank:
        torch.distributed.barrier()
    saves.close()
    return ended


def _state(moments: Any, *steps: int) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return {
        "moments": ShardedTensor.from_rank_offsets("moments", moments),
        "steps": ShardedObject("steps", steps, (1,), (0,)),
    }


def _begin(
    saves: Any, strategy: str, folder: Path, state: Any, start_file: Path | None = None
) -> None:
    """Schedule an asynchronous save by a persistent writer process.
    With `start_file` the process writes only once that file exists.
    """
    from megatron.core import dist_checkpointing

    from megatron_idempotent.megatron.layer_specs import takes

    folder.mkdir()
    options: dict[str, Any] = {"async_sharded_save": True}
    if takes(dist_checkpointing.save, "async_strategy"):
        options["async_strategy"] = strategy
    request = dist_checkpointing.save(state, str(folder), **options)
    if start_file:
        request = request._replace(
            async_fn=functools.partial(once_there, start_file, request.async_fn)
        )
    saves.schedule_async_request(request)


def shares(module: Any, strategy: str) -> None:
    """Save a host tensor asynchronously, and change it before the writer process writes the file.
    Raise a `Fault` if the checkpoint has the changed value.
    """
    import torch
    from megatron.core import dist_checkpointing

    moments, saves = torch.zeros(8), module.AsyncCallsQueue(persistent=True)
    with tempfile.TemporaryDirectory() as folder:
        saved, stepped = Path(folder, "saved"), Path(folder, "stepped")
        _begin(saves, strategy, saved, _state(moments), stepped)
        moments += 1
        stepped.touch()
        saves.maybe_finalize_async_calls(blocking=True)
        saves.close()
        loaded = dist_checkpointing.load(_state(torch.zeros(8)), str(saved))["moments"]
    if loaded.any():
        raise Fault(f"0 was saved, and the checkpoint has {float(loaded[0]):g}")


def aborts(module: Any, strategy: str) -> None:
    """Abort one save after its files are written, and one before; after each, save and load again.
    Raise a `Fault` if a load returns another state than was saved last, or if the unwritten save
    has metadata.
    """
    import torch
    from megatron.core import dist_checkpointing

    def save_and_load(folder: Path) -> None:
        _begin(saves, strategy, folder, _state(torch.ones(8), 1))
        saves.maybe_finalize_async_calls(blocking=True)
        loaded = dist_checkpointing.load(_state(torch.zeros(8)), str(folder))
        if not loaded["moments"].all() or loaded["steps"] != (1,):
            raise Fault("a load returns another state than was saved after an abort")

    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(number)) for number in range(4)]
        aborted = module.AsyncCallsQueue(persistent=True)
        _begin(aborted, strategy, folders[0], _state(torch.zeros(8), *range(99)))
        while _queue(aborted.async_calls[0].async_caller, "comp_q").empty():
            time.sleep(0.1)
        aborted.close(abort=True)
        saves = module.AsyncCallsQueue(persistent=True)
        save_and_load(folders[1])
        _begin(saves, strategy, folders[2], _state(torch.zeros(8)), Path(root, "never"))
        saves.close(abort=True)
        save_and_load(folders[3])
        saves.close()
        if Path(folders[2], ".metadata").exists():
            raise Fault("a save that was aborted counts as saved")
