"""An asynchronous save whose persistent writer dies, or gets no request, is waited for without end.

Symptom:
    With `--async-save --use-persistent-ckpt-worker` the process that writes is killed, such as for
    want of memory, or raises. The trainer asks it again at each iteration, makes no more
    checkpoints and says nothing; at the next save, or at its end, it hangs. So it does where a
    request cannot be sent, such as by a rank without a free file descriptor: only a thread's
    traceback tells of it. And so it does where a rank that has a process has nothing to write.

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

from . import _writers
from ._case import Patch, target


def reproduce() -> None:
    """Have the writer of rank 1 end, or get no request; then save again, and there nothing."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    _writers.ends(async_utils)


def neighbour() -> object:
    """Finalize a save of rank 0 alone, two that take a while, and one on each rank by itself."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    return _writers.lives(async_utils)


_UTILS = "core.dist_checkpointing.strategies.async_utils"
_CALLER = f"{_UTILS}:PersistentAsyncCaller"
PATCH = Patch(
    "an asynchronous save whose persistent writer has ended is waited for without end",
    target(f"{_CALLER}.schedule_async_call", _writers.schedule_async_call),
    target(f"{_CALLER}.is_current_async_call_done", _writers.is_current_async_call_done),
    target(f"{_CALLER}.close", _writers.close),
    target(
        f"{_UTILS}:AsyncCallsQueue.maybe_finalize_async_calls",
        _writers.maybe_finalize_async_calls,
    ),
    needs=("psutil",),
)
