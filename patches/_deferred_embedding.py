"""What the case files about `defer_embedding_wgrad_compute` share.

The output layer then keeps its inputs and output gradients in two lists, and its weight gradient is
computed from them behind the last backward. Upstream wants the fused CUDA kernel for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_idempotent.engine import Target

if TYPE_CHECKING:
    from megatron_idempotent.cpu.tiny import Tiny


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


def build(**options: Any) -> Tiny:
    """A model whose output layer defers its gradient, with the fused kernel's sum in Python."""
    import copy

    from megatron.core import parallel_state

    from megatron_idempotent.cpu import tiny

    kernel: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = _accumulate
    sys.modules[kernel.__name__] = kernel
    model = tiny.build(pp=2, **options)
    (chunk,) = model.chunks
    # Copies: with this layer spec each ColumnParallelLinear would read the flag.
    deferring = copy.copy(model.config)
    deferring.defer_embedding_wgrad_compute = True
    deferring.gradient_accumulation_fusion = True
    deferring.wgrad_deferral_limit = 0
    chunk.config = model.config = deferring
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        gpt = chunk.module
        gpt.embedding_activation_buffer = []
        gpt.grad_output_buffer = []
        layer = gpt.output_layer
        layer.config = deferring
        layer.gradient_accumulation_fusion = True
        layer.embedding_activation_buffer = gpt.embedding_activation_buffer
        layer.grad_output_buffer = gpt.grad_output_buffer
    return model


def _accumulate(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    import torch

    with torch.no_grad():  # the inputs still require gradients, and a kernel does not care
        main_grad.add_(grad_output.t().matmul(total_input))


def output_weight(model: Tiny) -> Any:
    """The output layer's weight on the last stage, None elsewhere."""
    layer = getattr(model.chunks[-1].module, "output_layer", None)
    return getattr(layer, "weight", None)
