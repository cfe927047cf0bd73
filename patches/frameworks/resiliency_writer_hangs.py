"""A save by the resiliency extension hangs if its persistent writer dies.

Symptom:
    With `--async-save --use-persistent-ckpt-worker`, and NVIDIA's resiliency extension, the writing
    process is killed or raises, or cannot start, for example without a GPU. The trainer writes no
    more checkpoints and reports nothing; at the next save, or at its end, it hangs. It also hangs
    if a rank has nothing to write, because its process was started beforehand. With
    `--async-ckpt-use-cpu-shm` and `--ckpt-assume-constant-structure` a save that begins while the
    previous one is being written hangs if a rank has no tensor on a GPU, though no process has
    died; after a `train()` has ended it does not wait at all, and overwrites the previous save's
    values.

Cause:
    `PersistentAsyncCaller` waits for items that the process puts into queues, as Megatron's own
    does (`dead-checkpoint-writer-hangs`), without checking whether the process is alive. With
    shared memory it finalizes the previous save, which is a collective, but only on the ranks that
    will write to this memory again. `AsyncCallsQueue.close` turns this wait off permanently, though
    the queue is used again, and a queue that Megatron creates at a save, without
    `init_persistent_async_worker`, never waits.

Affects:
    0.6.0 and 0.7.0, through which megatron-core saves from 0.17 on unless `--async-strategy mcore`
    says otherwise. What the patch does: the same as `dead-checkpoint-writer-hangs`. Before a rank
    writes into shared memory it waits only for its own process, and the save is finalized when all
    ranks call for it. Tensors that the process had cached (`--ckpt-assume-constant-structure`) are
    sent to the next process at its first save: on an H100 a process that was started after a
    `close()` died because it lacked them, and the trainer waited for it.

Upstream:
    https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/src/nvidia_resiliency_ext/checkpointing/async_ckpt/core.py,
    `PersistentAsyncCaller`; no thread found.

Remove when:
    `maybe_finalize_async_calls` raises on all ranks if a persistent writer has ended.
"""

from __future__ import annotations

import functools
import importlib
import time
from typing import Any

from megatron_idempotent.patches import _writers
from megatron_idempotent.patches._case import Fault, Original, Patch, target

_CORE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
_CALLER = f"{_CORE}:PersistentAsyncCaller"
_WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"


def schedule_async_request(original: Original, self: Any, async_request: Any) -> Any:
    """Wrap the start of a save: register a callback that waits for this rank's writer process.
    The next save calls it before it writes into the shared memory that this process reads.
    """
    if self.persistent:  # Megatron does not pass `cpu_shm_mode` to each of its queues
        writer = importlib.import_module(_WRITER).FileSystemWriterAsync
        writer.register_shm_drain_callback(functools.partial(_writers.drain, self))
    return original(self, async_request)


def reproduce() -> None:
    """Save while rank 1's writer process ends, reuse shared memory, and close a queue with a cache.
    Without the patch the next save hangs, overwrites the memory of the previous one, or does not
    send tensors that only the ended process had cached.
    """
    core = importlib.import_module(_CORE)
    _writers.ends(core)
    writer = importlib.import_module(_WRITER).FileSystemWriterAsync
    saves = core.AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
    saves.close()  # and use it again, as a second train() does
    _writers.lose(core, saves)
    writer._shm_drain_callback()  # as in a save that uses the memory again
    if not saves.get_num_unfinalized_calls():
        raise Fault("a rank has finalized a save by itself")
    _writers.refused(saves, "ended with 3")
    saves.close()
    saves = core.AsyncCallsQueue(persistent=True)  # as when Megatron creates a queue at a save
    begun = time.monotonic()
    saves.schedule_async_request(core.AsyncRequest(time.sleep, (0.5,), []))
    writer._shm_drain_callback()
    if time.monotonic() - begun < 0.5:
        raise Fault("a save writes into memory that the previous save still reads")
    saves.maybe_finalize_async_calls(blocking=True)
    writer._cached_identifiers.add("a structure in the process's cache")
    saves.close()
    if writer._cached_identifiers:
        raise Fault("the next writer does not get the tensors that the previous one had cached")


def control() -> object:
    """Run saves with writer processes that stay alive, as a control, and return their results."""
    return _writers.lives(importlib.import_module(_CORE))


PATCH = Patch(
    "a save by the resiliency extension whose persistent writer has ended is waited for",
    target(
        f"{_CALLER}.schedule_async_call",
        _writers.schedule_async_call,
        "self.preload_q.join()",
        "self.queue.put(async_req)",
    ),
    target(
        f"{_CALLER}.is_current_async_call_done",
        _writers.is_current_async_call_done,
        "self.cur_item = self.comp_q.get_nowait()",
    ),
    target(f"{_CALLER}.close", _writers.close, "self.queue.put('DONE')"),
    target(
        f"{_CORE}:AsyncCallsQueue.maybe_finalize_async_calls",
        _writers.maybe_finalize_async_calls,
        "self.async_calls.popleft()",
    ),
    target(
        f"{_CORE}:AsyncCallsQueue.schedule_async_request",
        schedule_async_request,
        "self._get_async_caller()",
    ),
    since="0.6",
    needs=("psutil",),
    loudness="both",
)
