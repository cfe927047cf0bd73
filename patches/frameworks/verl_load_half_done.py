"""A load by verl that fails leaves the checkpoint's weights with the run's optimizer.

Symptom:
    A file of a checkpoint is missing or truncated. `load_checkpoint` raises after it has loaded the
    weights: weights are those of the checkpoint, optimizer and main parameters those of the run. Or
    one rank cannot read the folder: it raises, and the others wait for it.

Cause:
    A checkpoint has three folders, `model`, `optimizer` and `extra`, and
    `MegatronCheckpointManager.load_checkpoint` loads one after the other into the run. Before it
    calls Megatron, each rank reads files separately.

Affects:
    0.9 and main of August 2026; earlier releases have one folder. What the patch does: before the
    first folder is loaded, ranks check the files of all folders to load, each rank a part of them,
    and all raise if one is missing, truncated or cannot be opened. All also raise if a rank fails
    later, or cannot write (`save_checkpoint`). All ranks must call saves and loads. A load with
    `use_megatron_fsdp` only exchanges failures at its end.

Upstream:
    https://github.com/verl-project/verl/blob/main/verl/utils/checkpoint/megatron_checkpoint_manager.py,
    `MegatronCheckpointManager.load_checkpoint`; no thread found.

Remove when:
    verl reads all folders before it writes into the run, and raises on all ranks.
    `upstream/verl-load-half-done` has the repair.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from megatron_idempotent.patches import _checkpoints
from megatron_idempotent.patches._case import Fault, Original, Patch, arguments, target

from ._verl import MANAGER, saved

if TYPE_CHECKING:
    from collections.abc import Iterator


def load(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap verl's load: check all files first, and if one rank raises, raise on all ranks."""
    return _checkpoints.load(_load, original, self, *args, **kwargs)


def _load(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    from megatron_idempotent.window import agreement

    path = arguments(original, (self, *args), kwargs)["local_path"]
    with agreement.attempt(_checkpoints.UNCHANGED):
        for folder in _folders(self, sys.modules[original.__module__], path):
            _check_files(folder)
    return original(self, *args, **kwargs)


def _folders(self: Any, module: Any, path: str) -> Iterator[str]:
    """Yield the folders with Megatron's shards which verl's checkpoint manager is going to load."""
    if self.use_megatron_fsdp:
        return
    adapters = self.should_load_hf_model and self.peft_cls is not None
    for is_loaded, name in (
        (self.should_load_dist_ckpt_model or adapters, "model"),
        (self.should_load_optimizer, "optimizer"),
        (self.should_load_extra, "extra"),
    ):
        if is_loaded:
            yield getattr(module, f"get_{name}_dist_checkpoint_path")(path)


def _check_files(folder: str) -> None:
    """Raise if a file of a checkpoint folder is missing or too short.
    Each rank reads the common state, and checks its share of the other files.
    """
    import torch
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    dist_checkpointing.load_common_state_dict(folder)  # raises without metadata.json, too
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().storage_data.values()
    names = sorted({item.relative_path for item in stored})
    checked = names[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    _checkpoints.look_at_files(reader, [item for item in stored if item.relative_path in checked])


def reproduce() -> None:
    """Load with verl while rank 1 cannot open files, then with a truncated optimizer file.
    Without the patch rank 0 waits, and later the weights are loaded without the optimizer.
    """
    import os
    from pathlib import Path

    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    model, load, folder = saved()
    _checkpoints.expect_told(load)
    model.train_step(1, data_seed=1)
    weights = model.parameters()
    if torch.distributed.get_rank() == 0:
        largest = max(Path(folder, "optimizer").rglob("*.distcp"), key=lambda f: f.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    torch.distributed.barrier()
    try:
        load()
    except (Exception, CheckpointException):  # noqa: BLE001  the weights decide
        if model.parameters().equal(weights):
            return
    raise Fault("a file of the optimizer's is truncated, and weights are loaded")


def control() -> object:
    """Save with verl, train on, and load, as a control; return the weights' bytes."""
    model, load, _ = saved()
    model.train_step(1, data_seed=1)
    load()
    return model.bits()


_OF = f"{MANAGER}:MegatronCheckpointManager"
PATCH = Patch(
    "a load by verl that fails leaves weights of the checkpoint beside another optimizer",
    target(f"{_OF}.load_checkpoint", load, "self._load_content_metadata(metadata_source)"),
    target(
        f"{_OF}.save_checkpoint", _checkpoints.save, "self._save_transformer_config(local_path)"
    ),
    since="0.9",
    fixed_by=(
        (
            f"{_OF}.load_checkpoint",
            "self._check_dist_checkpoints([path for is_loaded, path in to_load if is_loaded])",
        ),
    ),
    loudness="both",
)
