"""Sets what a framework has to set on Megatron before it trains; safe to repeat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from megatron.core import distributed, parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from .megatron.loss_scale import LossScale
from .megatron.training import STAGE_OFFSET
from .window.hold import configs_of


def wire_train_config(
    model_chunks: Sequence[Any], optimizer: Any = None, *, align_grad_reduce: bool = False
) -> None:
    """Set the functions through which Megatron's schedules reach DDP and the optimizer.

    It always sets them: after a rebuilt model or optimizer, call it again. Call it with the
    chunks of one model; chunks of virtual pipeline stages share one config, whose functions are
    then lists.

    Args:
        model_chunks: this rank's chunks, wrapped in Megatron's `DistributedDataParallel`.
        optimizer: what `get_megatron_optimizer` returned for them; None for a reference model,
            which keeps `grad_scale_func` None.
        align_grad_reduce: let the interleaved schedule dispatch the gradient reductions, at the
            same time on all pipeline stages. (`align_param_gather` is read from the DDP config.)

    Raises:
        ValueError: no chunk, or a chunk that is not wrapped in DDP.
    """
    chunks = list(model_chunks)
    if not chunks:
        raise ValueError("wire_train_config() got no model chunk: pass the list that DDP wrapped")
    for chunk in chunks:
        if not hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"wire_train_config() got a {type(chunk).__name__}, which has no ddp_config: "
                "wrap it in megatron.core.distributed.DistributedDataParallel first"
            )
    ddp = chunks[0].ddp_config

    def per_chunk(method: str) -> Any:
        functions = [getattr(chunk, method) for chunk in chunks]
        return functions[0] if len(functions) == 1 else functions

    for config in configs_of(chunks):
        config.grad_scale_func = None if optimizer is None else LossScale(optimizer)
        config.finalize_model_grads_func = distributed.finalize_model_grads
        config.no_sync_func = per_chunk("no_sync") if ddp.overlap_grad_reduce else None
        # Aligned over the pipeline, reductions and gathers are dispatched by the schedule.
        align_grads = ddp.overlap_grad_reduce and align_grad_reduce
        config.grad_sync_func = per_chunk("start_grad_sync") if align_grads else None
        align_params = ddp.overlap_param_gather and ddp.align_param_gather
        config.param_sync_func = per_chunk("start_param_sync") if align_params else None


def seed_all(seed: int) -> int:
    """Seed Python, NumPy, torch and Megatron's trackers with `seed` + 100 × pipeline rank.

    Every rank calls it with the same seed, after `initialize_model_parallel`. The offset is added
    here, once: with the patch `pipeline-seed-offset` applied the ranks' seeds already differ, so
    the patch adds nothing.

    Returns:
        The seed that this rank was given.

    Raises:
        ValueError: `seed` is negative or no integer.
        RuntimeError: model parallelism is not initialised.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed_all() takes a non-negative int, got {seed!r}")
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "seed_all() needs the pipeline rank: initialise model parallelism first "
            "(parallel_state.initialize_model_parallel)"
        )
    stage = int(parallel_state.get_pipeline_model_parallel_rank())
    mine: int = seed + STAGE_OFFSET * stage
    random.seed(mine)
    numpy.random.seed(mine % 2**32)
    torch.manual_seed(mine)
    # Looked up here: this module may have been imported before apply().
    megatron_random.model_parallel_cuda_manual_seed(mine)
    return mine
