"""A save by the resiliency extension has the values from before an offload moved the tensors.

Symptom:
    With `--async-save --use-persistent-ckpt-worker --ckpt-assume-constant-structure`, and NVIDIA's
    resiliency extension, each checkpoint after an offload of weights or optimizer states has, bit
    for bit, the values from before it. Save and load report success.

Cause:
    `prepare_write_data` sends handles of tensors on the GPU once for each structure. The worker
    keeps these handles, and so the tensors' old memory: an offload and reload move the tensors to
    other addresses.

Affects:
    0.6.0, through which megatron-core saves from 0.17 on unless `--async-strategy mcore` says
    otherwise; seen on an H100. What the patch does: tensors whose address has changed since the
    last save are sent again. With `--async-ckpt-use-cpu-shm` upstream sends their values at each
    save.

Upstream:
    0.7.0 compares addresses; NeMo-RL reports it in https://github.com/NVIDIA-NeMo/RL/issues/3312.

Remove when:
    0.6 is no longer supported.
"""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

_WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"

#: Key of a structure → the addresses of its tensors at the last save.
_addresses: dict[str, list[int]] = {}


def prepare_write_data(original: Original, self: Any, plan: Any, planner: Any) -> None:
    """Wrap the preparation of a save: send the writer process all tensors again if one has moved.
    A tensor has moved if its memory address differs from that at the last save.
    """
    from torch.distributed.checkpoint.planner import WriteItemType

    if self.use_cached_data_structure and not self.use_cpu_shm_for_gpu_tensors:
        items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        key = importlib.import_module(_WRITER)._compute_data_structure_key_from_plan(items)
        tensors = map(planner.resolve_data, items)
        # The worker gets a copy of tensors on the host, or quantised ones, at each save.
        cached = [
            t for t in tensors if t.device.type != "cpu" and "dequantize" not in vars(type(t))
        ]
        addresses = [tensor.data_ptr() for tensor in cached]
        if _addresses.get(key) != addresses:
            type(self)._cached_identifiers.discard(key)
            _addresses[key] = addresses
    original(self, plan, planner)


def _prepared(folder: str, weights: Any) -> Any:
    """Prepare a save of `weights`; return the memory address that is sent to the writer process.
    Return None if no tensor is sent.
    """
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class OnDevice(torch.Tensor):
        """Stands in for a tensor on a GPU."""

        device = torch.device("cuda", 0)

    writer = importlib.import_module(_WRITER).FileSystemWriterAsync(
        folder, use_cached_data_structure=True
    )
    on_device, planner = torch.Tensor._make_subclass(OnDevice, weights), DefaultSavePlanner()
    planner.set_up_planner({"weights": on_device, "step": torch.ones(1)}, None, True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    writer.prepare_write_data(*writer.prepare_global_plan([plan]), planner)
    sent = writer.cached_tensor_data
    return sent and sent[1][0].data_ptr()


def reproduce() -> None:
    """Prepare a save, move the tensor as an offload does, and prepare another save.
    Without the patch the second one sends no tensor, and the writer process reads the old memory.
    """
    import torch

    weights = torch.zeros(8)
    with tempfile.TemporaryDirectory() as folder:
        _prepared(folder, weights)
        moved = weights.clone()
        sent = _prepared(folder, moved)
    if sent != moved.data_ptr():
        raise Fault("a tensor that has moved is not sent: the worker writes its old memory")


def control() -> object:
    """Prepare three saves of a tensor that does not move, as a control.
    Return three booleans: whether each save sends the tensor's address to the writer process.
    """
    import torch

    weights = torch.zeros(9)
    with tempfile.TemporaryDirectory() as folder:
        return [_prepared(folder, weights) == weights.data_ptr() for _ in range(3)]


PATCH = Patch(
    "a save by the resiliency extension has the values from before an offload moved tensors",
    target(
        f"{_WRITER}:FileSystemWriterAsync.prepare_write_data",
        prepare_write_data,
        "cache_exists = key in FileSystemWriterAsync._cached_identifiers",
        "FileSystemWriterAsync._cached_identifiers.add(key)",
    ),
    since="0.6",
    before="0.7",
    ranks=1,
    needs=("psutil",),
)
