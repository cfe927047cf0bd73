"""Sets up verl's checkpoint manager around a tiny model, for reproductions.

Devices, logs and Hugging Face folders are stand-ins.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from megatron_idempotent.patches._case import bench, shared_folder

from . import _standins

ABSENT = ("transformers", "omegaconf", "tensordict", "mbridge", "peft")
MANAGER = "verl.utils.checkpoint.megatron_checkpoint_manager"


def import_manager() -> Any:
    """Import verl's module of `MegatronCheckpointManager`, with stand-ins for devices and logs."""
    _standins.replace("ray")
    names = (
        "device",
        "fs",
        "checkpoint.checkpoint_manager",
        "megatron.dist_checkpointing",
        "megatron_utils",
        "checkpoint.megatron_checkpoint_manager",
    )
    module = _standins.import_all("verl.utils", names, *ABSENT)[names[-1]]
    import torch

    module.get_device_name = lambda: "cuda"
    module.is_device_available = lambda: True
    module.get_torch_device = lambda: torch.cuda
    module.is_non_local = lambda _: False
    module.local_mkdir_safe = _make
    module.log_with_rank = lambda *_, **__: None
    return module


def _make(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return path


class _Config(dict):  # type: ignore[type-arg]
    """Dictionary whose items are also attributes, like verl's configurations."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def manager_of(
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    *,
    scheduler_too: bool = False,
    fully_reshardable: bool = False,
    **checkpoint: Any,
) -> Any:
    """Return verl's checkpoint manager for a model; it saves in Megatron's distributed format.

    `checkpoint` is its configuration, `scheduler_too` is `use_checkpoint_opt_param_scheduler`, and
    `fully_reshardable` is `dist_ckpt_optim_fully_reshardable`. verl's defaults for both are off.
    """
    megatron = SimpleNamespace(
        dist_ckpt_optim_fully_reshardable=fully_reshardable,
        distrib_optim_fully_reshardable_mem_efficient=False,
    )
    return import_manager().MegatronCheckpointManager(
        config=SimpleNamespace(
            model=SimpleNamespace(path=""), actor=SimpleNamespace(megatron=megatron)
        ),
        checkpoint_config=_Config(async_save=False, **checkpoint),
        model_config=None,
        transformer_config=SimpleNamespace(),
        role="actor",
        model=chunks,
        arch="GPTModel",
        hf_config=None,
        param_dtype=None,
        share_embeddings_and_output_weights=False,
        processing_class=None,
        optimizer=optimizer,
        optimizer_scheduler=scheduler,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        use_checkpoint_opt_param_scheduler=scheduler_too,
        use_dist_checkpointing=True,
    )


def saved(*, fully_reshardable: bool = False) -> tuple[Any, Any, str]:
    """Train a step and save with verl; return the model, a function that loads, and the folder.
    The function loads the saved checkpoint into that model with verl.
    """
    import torch

    import_manager()  # before Megatron, as verl's program does
    model, folder = bench(), shared_folder()
    model.train_step(1, data_seed=0)
    manager = manager_of(model.chunks, model.optimizer, None, fully_reshardable=fully_reshardable)
    manager.save_checkpoint(folder)
    # Megatron copies into fp32 parameters in place.
    return model, lambda: torch.no_grad()(manager.load_checkpoint)(folder), folder
