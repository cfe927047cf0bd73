"""A save by the resiliency extension whose persistent writer dies is waited for without end.

Symptom:
    With `--async-save --use-persistent-ckpt-worker`, and NVIDIA's resiliency extension, the process
    that writes is killed or raises, or cannot start, such as without a GPU. The trainer makes no
    more checkpoints and says nothing; at the next save, or at its end, it hangs. So it does where a
    rank has nothing to write, as its process was started beforehand.

Cause:
    `PersistentAsyncCaller` waits for what the process puts into queues, as Megatron's own does
    (`dead-checkpoint-writer-hangs`). Nobody looks whether the process lives.

Affects:
    0.6.0 and 0.7.0, through which megatron-core saves from 0.17 on unless `--async-strategy mcore`
    says otherwise. What the patch does: what that one does. Tensors that the process had cached
    (`--ckpt-assume-constant-structure`) are sent to the next process at its first save: on an H100
    one that was started after a `close()` ended for want of them, and was waited for.

Upstream:
    https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/src/nvidia_resiliency_ext/checkpointing/async_ckpt/core.py,
    `PersistentAsyncCaller`; no thread found.

Remove when:
    `maybe_finalize_async_calls` raises on all ranks where a persistent writer has ended.
"""

from __future__ import annotations

import importlib
import os

from megatron_idempotent.patches import _writers
from megatron_idempotent.patches._case import Fault, Patch, target

_CORE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
_CALLER = f"{_CORE}:PersistentAsyncCaller"
_WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"


def reproduce() -> None:
    """Have the writer of rank 1 end, and ask for its save; then end one that keeps tensors."""
    core = importlib.import_module(_CORE)
    _writers.ends(core)
    sent = importlib.import_module(_WRITER).FileSystemWriterAsync._cached_identifiers
    saves = core.AsyncCallsQueue(persistent=True)
    saves.schedule_async_request(core.AsyncRequest(os.getpid, (), []))
    saves.maybe_finalize_async_calls(blocking=True)
    sent.add("what its process keeps")
    saves.close()
    if sent:
        raise Fault("the next writer is not sent what the one before it kept")


def neighbour() -> object:
    """Finalize a save for which rank 1 has nothing to write, then two that take a while."""
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
    since="0.6",
    needs=("psutil",),
)
