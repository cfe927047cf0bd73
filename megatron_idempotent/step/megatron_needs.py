"""Checks that Megatron has the patches that a step needs, and no option that it cannot run with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_idempotent.megatron import gather, moe
from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.megatron.optimizers import trained_by
from megatron_idempotent.patching.needs import Need, check_applied


def refuse_chunks(chunks: Sequence[Any]) -> None:
    """Raise `ValueError` for options of Megatron with which gradients would be wrong or missing."""
    for chunk in chunks:
        config = get_model_config(chunk)
        if getattr(config, "overlap_moe_expert_parallel_comm", False):
            raise ValueError(
                "TrainStep() got overlap_moe_expert_parallel_comm=True, whose schedule runs two "
                "microbatches in one and cannot be taken apart: set it to False"
            )
        shards = getattr(config, "gtp_weight_remat_size", None) or 1
        if shards > 1:
            raise ValueError(
                f"TrainStep() got gtp_weight_remat_size={shards}, whose ranks share weights and "
                "not batches, so that they are neither one replica nor several: set it to 1"
            )
        if getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            raise ValueError(
                "TrainStep() got reuse_grad_buf_for_mxfp8_param_ag=True, where a gather of "
                "parameters would overwrite the gradients of an open step: set it to False"
            )


def refuse_strangers(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise `ValueError` if the optimizer steps on parameters that are not these chunks'.

    Gradients come into the memory of the chunks' parameters, and others would never be updated.
    """
    known = {id(param) for chunk in chunks for param in chunk.parameters()}
    held = {id(param) for chunk in chunks for param in chunk.param_to_bucket_group}
    found = trained_by(optimizer)
    strangers = [param for param in found if id(param) not in known]
    if strangers:
        raise ValueError(
            f"TrainStep() got an optimizer of which {len(strangers)} of {len(found)} parameters "
            f"are not the chunks', such as one of shape {tuple(strangers[0].shape)}: pass what "
            "get_megatron_optimizer() returned for these chunks"
        )
    if found and not any(id(param) in held for param in found):
        raise ValueError(
            f"TrainStep() got an optimizer whose {len(found)} parameters none of the chunks' DDP "
            "reduces: pass what get_megatron_optimizer() returned for these chunks, not that of "
            "another DDP over the same modules"
        )


def refuse_scheduler(scheduler: Any) -> None:
    """Raise `ValueError` for a scheduler that cannot be stepped, or put back after a failure."""
    if scheduler is None:
        return
    lacking = [] if callable(getattr(scheduler, "step", None)) else ["step()"]
    if not hasattr(scheduler, "__dict__"):
        lacking.append("__dict__")
    if lacking or isinstance(scheduler, type):
        told = " and ".join(lacking) or "an object of it"
        raise ValueError(
            f"TrainStep() got {scheduler!r} as scheduler, without {told}: abort() puts back its "
            "attributes. Pass an OptimizerParamScheduler, or an object with step(increment=…) and "
            "without __slots__"
        )


def refuse_inexact(chunks: Sequence[Any]) -> None:
    """Raise `ValueError` for options with which `ExactSums` cannot take or keep all gradients."""
    for chunk in chunks:
        config = get_model_config(chunk)
        for name in ("defer_embedding_wgrad_compute", "delay_wgrad_compute"):
            if getattr(config, name, False):
                raise ValueError(
                    f"TrainStep(order_stable=True) got {name}=True, which computes gradients after "
                    "the backward in which they are taken: set it to False"
                )
        if config.fp16:
            raise ValueError(
                "TrainStep(order_stable=True) got fp16=True, whose loss scale changes what a "
                "gradient is rounded to: train in bf16, or leave order_stable out"
            )
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        if not config.calculate_per_token_loss and ranks & (ranks - 1):
            raise ValueError(
                f"TrainStep(order_stable=True) got {ranks} ranks over which DDP averages, which "
                "rounds unless they are a power of two: set calculate_per_token_loss=True, so that "
                "it sums"
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


# The step itself holds back reductions, scales losses, and drops what an aborted batch leaves. The
# rest is asked for only where a chunk has what is patched.
_NEEDS = (
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


def check_patches(chunks: Sequence[Any]) -> None:
    """Raise unless the patches that a step on these chunks needs are applied.

    Raises:
        RuntimeError: names each that is not, why it is not, and what is lost without it.
    """
    check_applied("TrainStep()", _NEEDS, chunks)
