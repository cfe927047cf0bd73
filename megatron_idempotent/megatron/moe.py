"""Resets the state of mixture-of-experts layers in a window; lists their auxiliary losses."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KEPT = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score")


def reset_shared_experts(shared: Any) -> None:
    """Drop the tensors that an interrupted forward of overlapped shared experts has kept."""
    for name in _KEPT:
        if getattr(shared, name, None) is not None:
            setattr(shared, name, None)
    state = getattr(shared, "_overlap_state", None)  # from 0.18 on
    if state is not None and state.name != "IDLE":
        shared._overlap_state = type(state)["IDLE"]


def forget_tokens(chunk: Any) -> None:
    """Zero the token counts that a chunk's routers add up over the microbatches of a step, for the
    expert bias, the global auxiliary loss and quantile balancing.
    """
    for module in chunk.modules():
        counted = getattr(module, "local_tokens_per_expert", None)
        if counted is not None:
            counted.zero_()
        if getattr(module, "global_tokens_per_expert", None) is not None:
            module.reset_global_aux_loss_tracker()
        if getattr(module, "qb_beta_accum", None) is not None:  # quantile balancing, from 0.19 on
            module.qb_beta_accum.zero_()
            module.qb_beta_count.zero_()


def ranks_of_a_sequence() -> int:
    """Return the number of ranks that share each sequence: TP size times CP size."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_context_parallel_group()
    return int(group.size())


@functools.cache
def losses_count_all_ranks() -> bool:
    """Return whether routers multiply auxiliary losses by the tokens of all ranks of a sequence.
    These are the tensor- and context-parallel ranks that share the sequence.

    They do so from 0.19 on; earlier releases multiply by the tokens of one rank.
    """
    import inspect

    from megatron.core.transformer.moe.router import TopKRouter

    attach = inspect.unwrap(TopKRouter.attach_and_log_load_balancing_loss)
    code = attach.__code__
    # The branch dev sums the tokens over the ranks; releases multiply by the number of ranks.
    return "aux_loss_scale_num_tokens" in code.co_varnames or "tp_cp_group" in code.co_names


@contextmanager
def multiplied(config: Any, name: str, factor: int) -> Iterator[None]:
    """Multiply the config's attribute `name` by `factor` during the block.
    The attribute is a coefficient or a list of coefficients; its value is restored at the end.
    """
    original = getattr(config, name)
    if not original or factor == 1:
        yield
        return
    several = isinstance(original, (list, tuple))
    setattr(config, name, [c * factor for c in original] if several else original * factor)
    try:
        yield
    finally:
        setattr(config, name, original)


def agreed_metrics(sizes: dict[str, int], *, pg_collection: Any = None) -> dict[str, int]:
    """Return metric → size for the metrics of all pipeline stages, in one order on all ranks.

    If the pipeline has several stages this is a collective: all its ranks gather their sizes.

    Args:
        sizes: metric → the number of its elements on this stage.
        pg_collection: has the pipeline's group as `pp`; by default Megatron's global group.

    Returns:
        Metric → the largest size on any stage.
    """
    import torch
    from megatron.core import parallel_state

    group = getattr(pg_collection, "pp", None)
    if group is None:
        group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return sizes
    everywhere: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everywhere, sizes, group=group)
    names = dict.fromkeys(name for stage in everywhere for name in stage)
    return {name: max(stage.get(name, 0) for stage in everywhere) for name in names}


def legacy_metrics() -> dict[str, Any]:
    """Return the metrics that routers record in Megatron before 0.18, by name."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    # In 0.12 they belong to parallel_state.
    owner = moe_utils if "get_moe_layer_wise_logging_tracker" in vars(moe_utils) else parallel_state
    metrics: dict[str, Any] = owner.get_moe_layer_wise_logging_tracker()
    return metrics


_COEFFICIENTS = (
    ("num_moe_experts", "moe_aux_loss_coeff"),
    ("num_moe_experts", "moe_z_loss_coeff"),
    ("mtp_num_layers", "mtp_loss_scaling_factor"),
    ("experimental_attention_variant", "dsa_indexer_loss_coeff"),
)


def auxiliary_losses(config: Any) -> list[str]:
    """Return the names of a config's auxiliary-loss coefficients that are not zero."""
    names = []
    for part, name in _COEFFICIENTS:
        value = getattr(config, name, None)
        values = value if isinstance(value, (list, tuple)) else [value]
        if getattr(config, part, None) and any(values):
            names.append(name)
    return names


def has_layers_with_losses(config: Any) -> bool:
    """Return whether a config has layers that can add auxiliary losses, even with coefficient 0.
    They are MoE layers, MTP layers and experimental attention.
    """
    return any(getattr(config, part, None) for part, _ in _COEFFICIENTS)


def adds_up_mtp_losses(config: Any) -> bool:
    """Return whether MTP losses are sums over the predicted tokens, not means, in this Megatron.

    They are sums before 0.17 if DDP adds up gradients (`calculate_per_token_loss`).
    """
    if not config.calculate_per_token_loss:
        return False
    import inspect

    from megatron.core.transformer import multi_token_prediction

    return "original_num_tokens" not in inspect.getsource(multi_token_prediction)


_TRANSFORMER = "megatron.core.transformer"
_SCALERS = (
    (f"{_TRANSFORMER}.moe.moe_utils", "MoEAuxLossAutoScaler"),
    (f"{_TRANSFORMER}.multi_token_prediction", "MTPLossAutoScaler"),
    (f"{_TRANSFORMER}.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)
_LOGS = (
    (f"{_TRANSFORMER}.multi_token_prediction", "MTPLossLoggingHelper"),
    (f"{_TRANSFORMER}.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)


def scalers() -> Iterator[Any]:
    """Yield Megatron's auxiliary-loss scalers, such as `MoEAuxLossAutoScaler`, that are imported.
    They are the classes whose `main_loss_backward_scale` the schedules set.
    """
    for module, name in _SCALERS:
        scaler = getattr(sys.modules.get(module), name, None)
        if scaler is not None:
            yield scaler


def layer_logs() -> Iterator[Any]:
    """Yield the tensors in which MTP and DSA layers log their losses. MoE layers log elsewhere."""
    import torch

    for module, name in _LOGS:
        tracker = getattr(getattr(sys.modules.get(module), name, None), "tracker", {})
        yield from (value for value in tracker.values() if isinstance(value, torch.Tensor))
