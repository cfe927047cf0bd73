"""Refuses models, optimizers and schedulers that `TrainStep` cannot train right, and names patches.

All of it runs once, when a step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_idempotent.megatron import gather, moe
from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.megatron.optimizers import trained_by
from megatron_idempotent.patching.needs import Need

_NEITHER = (
    "whose ranks share weights and not batches, so that they are neither one replica nor several"
)
_LATE = "computes gradients after the backward in which order_stable=True takes them"
#: Settings of a model or its DDP, true or above 1, that a step refuses: why, and what to do.
_REFUSED = {
    "overlap_moe_expert_parallel_comm": "whose schedule runs two microbatches in one and cannot be "
    "taken apart: set it to False",
    "gtp_weight_remat_size": f"{_NEITHER}: set it to 1",
    "expert_gtp_weight_remat_size": f"{_NEITHER}: set it to 1",
    "reuse_grad_buf_for_mxfp8_param_ag": "where a gather of parameters would overwrite the "
    "gradients of an open step: set it to False",
}
#: Settings with which `ExactSums` cannot take or keep all gradients.
_REFUSED_BY_SUMS = {
    "defer_embedding_wgrad_compute": f"which {_LATE}: set one of the two to False",
    "delay_wgrad_compute": f"which {_LATE}: set one of the two to False",
    "fp16": "whose loss scale changes what a gradient is rounded to: train in bf16, or leave "
    "order_stable out",
}


def refuse_chunks(chunks: Sequence[Any], *, order_stable: bool) -> None:
    """Raise `ValueError` for options of Megatron with which gradients would be wrong or missing.

    With `order_stable`, raise also for options with which `ExactSums` cannot take or keep all
    gradients.
    """
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    for chunk in chunks:
        config = get_model_config(chunk)
        for name, reason in {**_REFUSED, **(_REFUSED_BY_SUMS if order_stable else {})}.items():
            value = getattr(config, name, getattr(chunk.ddp_config, name, None))
            if value is True or (value or 1) > 1:
                raise ValueError(f"TrainStep() got {name}={value}, {reason}")
        if order_stable and not config.calculate_per_token_loss and ranks & (ranks - 1):
            raise ValueError(
                f"TrainStep() got {ranks} ranks over which DDP averages, which rounds unless they "
                "are a power of two: set calculate_per_token_loss=True, so that it sums, or leave "
                "order_stable out"
            )


def refuse_strangers(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise `ValueError` if the optimizer and these chunks do not fit each other.
    The optimizer must step on parameters of these chunks only, and on at least one that the chunks'
    DDP reduces.

    Only the chunks' parameters get gradients, so that the step would never update the others.
    """
    chunk_ids = {id(param) for chunk in chunks for param in chunk.parameters()}
    ddp_ids = {id(param) for chunk in chunks for param in chunk.param_to_bucket_group}
    trained = trained_by(optimizer)
    strangers = [param for param in trained if id(param) not in chunk_ids]
    if strangers:
        raise ValueError(
            f"TrainStep() got an optimizer of which {len(strangers)} of {len(trained)} parameters "
            f"are not the chunks', such as one of shape {tuple(strangers[0].shape)}: pass what "
            "get_megatron_optimizer() returned for these chunks"
        )
    if trained and not any(id(param) in ddp_ids for param in trained):
        raise ValueError(
            f"TrainStep() got an optimizer whose {len(trained)} parameters none of the chunks' DDP "
            "reduces: pass what get_megatron_optimizer() returned for these chunks, not that of "
            "another DDP over the same modules"
        )


def _set(name: str) -> Callable[[Any], bool]:
    return lambda chunk: bool(getattr(get_model_config(chunk), name, False))


def _gathers_layer_wise(chunk: Any) -> bool:
    return bool(chunk.ddp_config.overlap_param_gather) and any(
        map(gather.is_layer_wise, bucket_groups(chunk))
    )


def _defers_with_mtp(chunk: Any) -> bool:
    config = get_model_config(chunk)
    return bool(config.defer_embedding_wgrad_compute and getattr(config, "mtp_num_layers", None))


def _shares_sequences_per_token(chunk: Any) -> bool:
    config = get_model_config(chunk)
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    routers = any(name.startswith("moe_") for name in moe.auxiliary_losses(config))
    return ranks > 1 and config.calculate_per_token_loss and routers


# The step itself holds back reductions, scales losses, and drops what an aborted batch leaves.
# Other patches are required only for chunks with the features that they patch.
NEEDS = (
    Need(
        "schedules-ask-windows",
        "a schedule that is called to train while a step is open reduces in the middle of it",
        a_door=True,
    ),
    Need(
        "layer-wise-gathers-watched",
        "reading() sees parameters of other ranks without the last update",
        _gathers_layer_wise,
    ),
    Need(
        "deferred-embedding-drained",
        "a batch of one microbatch raises",
        _set("defer_embedding_wgrad_compute"),
    ),
    Need(
        "deferred-embedding-ordered",
        "with last=True the output layer's gradient is reduced before it is computed",
        _set("defer_embedding_wgrad_compute"),
    ),
    Need(
        "deferred-embedding-paired",
        "with MTP layers the output layer's gradient is another one, in another weight",
        _defers_with_mtp,
    ),
    Need(
        "forward-only-counts-nothing",
        "a forward-only schedule while a step is open counts for its expert bias",
        _set("moe_router_enable_expert_bias"),
    ),
    Need(
        "aux-losses-count-all-tokens",
        "with calculate_per_token_loss MoE's losses have 1/(TP x CP) of their weight",
        _shares_sequences_per_token,
    ),
)
