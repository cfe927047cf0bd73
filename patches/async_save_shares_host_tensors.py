"""A checkpoint that a persistent worker writes contains optimizer steps from after the save.

Symptom:
    After an asynchronous save with a persistent worker (`--async-save
    --use-persistent-ckpt-worker`) the checkpoint has later values of tensors on the host, such as
    Adam's moments of an optimizer that is offloaded to the CPU: those of a later step, or of two
    steps. Weights are those of the save. Save and load report success.

Cause:
    `prepare_write_data` copies a tensor on the host only if it is a view. It gets the others
    through shared memory, which the optimizer then goes on changing.

Affects:
    0.13 and later, with Megatron's own worker (`--async-strategy mcore`); that of 0.12 cannot write
    with today's torch. Without `--use-persistent-ckpt-worker` a worker is forked for each save, and
    sees the tensors at the time of the fork. What the patch does: the persistent worker gets copies
    of tensors on the host, which live until the save is written. Upstream copies tensors on a
    device itself. NVIDIA's resiliency extension has the same hazard:
    `resiliency-save-shares-host-tensors`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/dist_checkpointing/strategies/filesystem_async.py,
    `_clone_if_needed`, whose comment says what is left to do for this worker.
    https://github.com/NVIDIA-NeMo/RL/issues/3312 reports checkpoints with values of other steps,
    where the worker kept tensors on the device.

Remove when:
    the writer copies host tensors for a persistent worker.
    `upstream/async-save-shares-host-tensors` has the repair.
"""

from __future__ import annotations

import functools
from typing import Any

from . import _writers
from ._case import Original, Patch, address, target


def schedule(original: Original, self: Any, async_req: Any) -> None:
    """Wrap an asynchronous save's start: give the writer process copies of tensors on the host."""
    import torch
    from torch.utils._pytree import tree_map

    copies: dict[int, Any] = {}  # preparing and writing use the same tensors

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
    """Save a host tensor asynchronously, and change it before the writer process writes it.
    On stock Megatron the checkpoint has the changed value.
    """
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
    fixed_by=(
        (
            address(
                "core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors"
            ),
            "copy = tensor.is_shared()",
        ),
    ),
)
