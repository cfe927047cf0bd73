"""An asynchronous save hangs if its persistent writer dies, or gets no request.

Symptom:
    With `--async-save --use-persistent-ckpt-worker` the writing process is killed, for example
    because memory runs out, or raises. The trainer polls it at each iteration, writes no more
    checkpoints and reports nothing; at the next save, or at its end, it hangs. The same happens if
    a request cannot be sent, for example because a rank has no free file descriptor (only a thread
    prints a traceback), and if a rank with a process has nothing to write.

Cause:
    `PersistentAsyncCaller` waits for items that the process puts into queues: in
    `is_current_async_call_done`, when it hands over tensors, and in `close`. It checks neither
    whether the process is alive nor whether the queue's thread could send.

Affects:
    Every release, with Megatron's own worker (`--async-strategy mcore`). What the patch does: the
    trainer notices a dead writer at its next poll. Once all ranks know the state of their writers,
    all raise, with the exit code. The save does not count, and the next save starts another
    process; so does a save that finds its writer dead. This costs two collectives of a few bytes
    per save. With `no_dist` a rank raises alone.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/dist_checkpointing/strategies/async_utils.py,
    `PersistentAsyncCaller`. https://github.com/NVIDIA/Megatron-LM/issues/6970 reports processes
    that end or raise.

Remove when:
    `maybe_finalize_async_calls` raises on all ranks if a persistent writer has ended.
"""

from __future__ import annotations

from . import _writers
from ._case import Patch, target


def reproduce() -> None:
    """End rank 1's writer process, or give it a request that cannot be pickled, then save again.
    On stock Megatron the next save hangs, without an error.
    """
    from megatron.core.dist_checkpointing.strategies import async_utils

    _writers.ends(async_utils)


def control() -> object:
    """Run saves with writer processes that stay alive, as a control, and return their results."""
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
    loudness="loud",
)
