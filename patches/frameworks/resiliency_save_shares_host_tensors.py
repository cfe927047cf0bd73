"""A checkpoint that the resiliency extension's persistent worker writes contains later steps.

Symptom:
    With `--async-save --use-persistent-ckpt-worker`, and NVIDIA's resiliency extension, the
    checkpoint has later values of tensors on the host, such as Adam's moments of an optimizer that
    is offloaded to the CPU: those of a later step, or of two steps. Save and load report success.

Cause:
    `prepare_write_data` copies a tensor on the host only if it is a view, as Megatron's own does
    (`async-save-shares-host-tensors`). The worker gets the others through shared memory, which the
    optimizer then goes on changing.

Affects:
    0.6.0 and 0.7.0, through which megatron-core saves from 0.17 on unless `--async-strategy mcore`
    says otherwise. Without `--use-persistent-ckpt-worker` a worker is forked for each save. What
    the patch does: the worker gets copies of tensors on the host, which live until the save is
    written. Tensors on a device, and the extension's own copies of them in shared memory, are sent
    as before.

Upstream:
    https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/src/nvidia_resiliency_ext/checkpointing/async_ckpt/filesystem_async.py,
    `prepare_write_data`; no thread found.

Remove when:
    the writer copies host tensors for a persistent worker.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from megatron_idempotent.patches import _writers
from megatron_idempotent.patches._case import Original, Patch, target

_CORE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


def schedule(original: Original, self: Any, async_req: Any) -> None:
    """Wrap an asynchronous save's start: give the writer process copies of tensors on the host."""
    prepare = async_req.preload_fn
    if getattr(getattr(prepare, "func", None), "__name__", "") == "preload_tensors":
        (folder, (key, (hint, cached, fresh, *tail))), *options = prepare.args
        if fresh is not None:  # items, and tensors that the worker does not cache
            fresh = fresh[0], [tensor if tensor.is_cuda else tensor.clone() for tensor in fresh[1]]
        data = folder, (key, (hint, cached, fresh, *tail))
        prepare = functools.partial(prepare.func, data, *options, **prepare.keywords)
    original(self, async_req._replace(preload_fn=prepare))


def reproduce() -> None:
    """Save a host tensor asynchronously, and change it before the writer process writes it.
    Without the patch the checkpoint has the changed value.
    """
    _writers.shares(importlib.import_module(_CORE), "nvrx")


PATCH = Patch(
    "with the resiliency extension's persistent worker a save has later values of host tensors",
    target(
        f"{_CORE}:PersistentAsyncCaller.schedule_async_call",
        schedule,
        "self.preload_q.join()",
        "self.queue.put(async_req)",
    ),
    since="0.6",
    ranks=1,
    needs=("psutil",),
)
