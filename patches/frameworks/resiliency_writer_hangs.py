"""A save by the resiliency extension whose persistent writer dies is waited for without end.

Symptom:
    With `--async-save --use-persistent-ckpt-worker`, and NVIDIA's resiliency extension, the process
    that writes is killed or raises, or cannot start, such as without a GPU. The trainer makes no
    more checkpoints and says nothing; at the next save, or at its end, it hangs. So it does where a
    rank has nothing to write, as its process was started beforehand. And with
    `--async-ckpt-use-cpu-shm` and `--ckpt-assume-constant-structure` a save that begins while the
    one before is written hangs where a rank has no tensor on a GPU, though no process has died;
    after a `train()` has ended it does not wait at all, and the one before gets its values.

Cause:
    `PersistentAsyncCaller` waits for what the process puts into queues, as Megatron's own does
    (`dead-checkpoint-writer-hangs`). Nobody looks whether the process lives. With shared memory it
    finalizes the save before, which is a collective, on the ranks that are to write there again.
    `AsyncCallsQueue.close` ends that waiting for good, though the queue is used again, and a queue
    that Megatron makes at a save, without `init_persistent_async_worker`, never waits.

Affects:
    0.6.0 and 0.7.0, through which megatron-core saves from 0.17 on unless `--async-strategy mcore`
    says otherwise. What the patch does: what that one does. Before a rank writes into shared memory
    it waits for its own process alone, and the save is finalized where all ranks ask. Tensors that
    the process had cached (`--ckpt-assume-constant-structure`) are sent to the next process at its
    first save: on an H100 one that was started after a `close()` ended for want of them, and was
    waited for.

Upstream:
    https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/src/nvidia_resiliency_ext/checkpointing/async_ckpt/core.py,
    `PersistentAsyncCaller`; no thread found.

Remove when:
    `maybe_finalize_async_calls` raises on all ranks where a persistent writer has ended.
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
    """Have the save after this one wait for this rank's process, whose shared memory it needs."""
    if self.persistent:  # Megatron does not tell each of its queues `cpu_shm_mode`
        writer = importlib.import_module(_WRITER).FileSystemWriterAsync
        writer.register_shm_drain_callback(functools.partial(_writers.drain, self))
    return original(self, async_request)


def reproduce() -> None:
    """Have the writer of rank 1 end, also where its memory is needed; then end one with tensors."""
    core = importlib.import_module(_CORE)
    _writers.ends(core)
    writer = importlib.import_module(_WRITER).FileSystemWriterAsync
    saves = core.AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
    saves.close()  # and use it again, as a second train() does
    _writers.lose(core, saves)
    writer._shm_drain_callback()  # as a save does that needs the memory
    if not saves.get_num_unfinalized_calls():
        raise Fault("a rank has finalized a save by itself")
    _writers.refused(saves, "ended with 3")
    saves.close()
    saves = core.AsyncCallsQueue(persistent=True)  # as Megatron makes one that it lacks at a save
    begun = time.monotonic()
    saves.schedule_async_request(core.AsyncRequest(time.sleep, (0.5,), []))
    writer._shm_drain_callback()
    if time.monotonic() - begun < 0.5:
        raise Fault("a save writes into memory that the one before still reads")
    saves.maybe_finalize_async_calls(blocking=True)
    writer._cached_identifiers.add("what its process keeps")
    saves.close()
    if writer._cached_identifiers:
        raise Fault("the next writer is not sent what the one before it kept")


def neighbour() -> object:
    """Finalize a save of rank 0 alone, two that take a while, and one on each rank by itself."""
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
)
