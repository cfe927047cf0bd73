"""Finds the buffers and weight that `defer_embedding_wgrad_compute` works on.

The output layer then keeps its inputs and output gradients in two lists, and its weight gradient is
computed from them after the last backward. Upstream wants the fused CUDA kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target

#: Those that defer.
SCHEDULES = (
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def drain_target(wrapper: Callable[..., Any]) -> Target:
    """The function that computes the deferred gradient."""
    return Target(
        address="megatron.core.utils:drain_embedding_wgrad_compute",
        wrapper=wrapper,
        reviewed={"f9fd584dcfd3": "0.12.0 to 0.13.1", "af081b2e07d0": "0.14.0 to 0.19.2"},
    )


def buffers(model: Any) -> tuple[list[Any], list[Any]] | None:
    """Activations and output gradients kept on the last stage; None where nothing is deferred."""
    holder = _holder(model[-1] if isinstance(model, list) else model)
    return (
        None if holder is None else (holder.embedding_activation_buffer, holder.grad_output_buffer)
    )


def weight(chunk: Any) -> Any:
    """The weight whose gradient the chunk defers; None where it defers none, or it is frozen."""
    holder = _holder(chunk)
    if holder is None:
        return None
    # As upstream's schedules find it.
    if holder.share_embeddings_and_output_weights:
        found = holder.output_layer.weight
    else:
        found = holder.shared_embedding_or_output_weight()
    return found if found is not None and found.requires_grad else None


def _holder(chunk: Any) -> Any:
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    if not get_model_config(chunk).defer_embedding_wgrad_compute:
        return None
    try:
        holder = get_attr_wrapped_model(chunk, "embedding_activation_buffer", return_model_obj=True)
    except RuntimeError:  # upstream's word for: no module has it
        return None
    if holder.embedding_activation_buffer is None or holder.grad_output_buffer is None:
        return None
    return holder
