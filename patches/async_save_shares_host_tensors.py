"""A checkpoint that a persistent worker writes has optimizer steps in it that came after the save.

Symptom:
    After an asynchronous save with a persistent worker (`--async-save
    --use-persistent-ckpt-worker`) tensors on the host, such as Adam's moments of an optimizer that
    is offloaded to the CPU, have the values of a later step in the checkpoint, or of two steps.
    Weights are those of the save. Save and load report success.

Cause:
    `prepare_write_data` copies a tensor on the host only if it is a view. The worker gets the
    others through shared memory, in which the optimizer then goes on.

Affects:
    0.13 and later, with Megatron's own worker (`--async-strategy mcore`); that of 0.12 cannot write
    with a torch of today. Without `--use-persistent-ckpt-worker` a worker is forked for each save,
    and sees the tensors as they are then. What the patch does: the persistent worker gets copies of
    tensors on the host, which live until the save is written. What is on a device was copied
    before. NVIDIA's resiliency extension does so, too: `resiliency-save-shares-host-tensors`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/dist_checkpointing/strategies/filesystem_async.py,
    `_clone_if_needed`, which says what is left to do for this worker. Of checkpoints with other
    steps in them: https://github.com/NVIDIA-NeMo/RL/issues/3312, where the worker kept tensors on
    the device.

Remove when:
    the writer copies host tensors for a persistent worker.
"""

from __future__ import annotations

import functools
from typing import Any

from . import _writers
from ._case import Original, Patch, target


def schedule(original: Original, self: Any, async_req: Any) -> None:
    """Give the worker copies of what is on the host."""
    import torch
    from torch.utils._pytree import tree_map

    copies: dict[int, Any] = {}  # what prepares the save and what writes it have the same tensors

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]

    prepare = async_req.preload_fn
    if isinstance(prepare, functools.partial):
        prepare = functools.partial(
            prepare.func, *tree_map(copied, prepare.args), **tree_map(copied, prepare.keywords)
        )
    arguments = tree_map(copied, async_req.async_fn_args)
    original(self, async_req._replace(async_fn_args=arguments, preload_fn=prepare))


def reproduce() -> None:
    """Save a tensor on the host, and change it before the worker gets to write it."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    _writers.shares(async_utils, "mcore")


PATCH = Patch(
    "with a persistent worker an asynchronous save has later values of host tensors",
    target(
        "core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.schedule_async_call",
        schedule,
    ),
    since="0.13",
    ranks=1,
    needs=("psutil",),
)
