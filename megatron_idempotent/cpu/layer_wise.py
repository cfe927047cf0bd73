"""Upstream's `LayerWiseDistributedOptimizer`, which gives each rank whole parameters to update.

From 0.18 it gathers them out of DDP's buffers, which are laid out for it (`by_layout`), or through
lists of parameters per rank, which is all that 0.17 has and what models with experts fall back to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.megatron.layer_specs import takes

_MODULE = "megatron.core.optimizer.layer_wise_optimizer"


def has_layout() -> bool:
    """Returns whether this release lays DDP's buffers out for the optimizer."""
    return hasattr(_optimizer_class(), "compute_full_param_layout")


def prepare(module: Any, ddp_config: Any, *, by_layout: bool, muon: bool) -> dict[str, Any]:
    """Prepare a model that is not in DDP yet; returns further arguments for its DDP.

    With Muon the vectors and embeddings go to a DistributedOptimizer of their own, as upstream
    routes them; without, the layer-wise optimizer has everything.
    """
    if not by_layout:
        return {}
    import importlib

    from megatron.core import parallel_state

    if muon:
        importlib.import_module(_MODULE).tag_params_for_buffer_routing([module])
    else:
        for parameter in module.parameters():
            parameter.is_managed_by_layer_wise_optimizer = True
    layout = _optimizer_class().compute_full_param_layout(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )
    return {"full_param_layout": layout}


def build_optimizer(values: Mapping[str, Any], chunks: list[Any]) -> Any:
    """Around Muon (`emerging-optimizers`) by upstream's own factory, around torch's AdamW here.

    `values` are fields of OptimizerConfig; `use_distributed_optimizer` in it is ignored, as
    upstream's arguments clear it.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    wanted = {**values, "use_distributed_optimizer": False}
    muon = wanted["optimizer"] == "muon"
    if muon:
        wanted["use_layer_wise_distributed_optimizer"] = True
    config = OptimizerConfig(**{name: v for name, v in wanted.items() if name in names})
    if not muon:
        return _around_adam(config, chunks)
    if "use_layer_wise_distributed_optimizer" in names:
        return get_megatron_optimizer(config, chunks)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config, chunks, use_gloo_process_groups=False, layer_wise_distributed_optimizer=True
    )


def _around_adam(config: Any, chunks: list[Any]) -> Any:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    parameters = [p for chunk in chunks for p in chunk.module.parameters() if p.requires_grad]
    kinds = (
        (False, [p for p in parameters if getattr(p, "allreduce", True)]),
        (True, [p for p in parameters if not getattr(p, "allreduce", True)]),
    )
    groups = [
        {
            "params": members,
            "is_expert_parallel": is_expert,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
        }
        for is_expert, members in kinds
        if members
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    layer_wise = _optimizer_class()
    # 0.17 and commits between it and 0.18 have an argument for it, later ones read the config.
    overlap = {
        name: config.overlap_param_gather
        for name in ("async_allgather", "overlap_param_gather")
        if takes(layer_wise.__init__, name)
    }
    return layer_wise(
        [optimizer],
        config,
        ProcessGroupCollection.use_mpu_process_groups(),
        init_state_fn_list=None,
        model_chunks=chunks,
        **overlap,
    )


def _optimizer_class() -> Any:
    import importlib

    return importlib.import_module(_MODULE).LayerWiseDistributedOptimizer
