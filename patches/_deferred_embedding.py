"""Builds a model whose output layer defers its weight gradient, for reproductions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ._case import bench


def kernel() -> ModuleType:
    """Put a Python stand-in for Apex's weight-gradient kernel into `sys.modules`, and return it."""
    module: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = _accumulate
    sys.modules[module.__name__] = module
    return module  # type: ignore[no-any-return]


def build(**options: Any) -> Any:
    """Build a tiny model of two pipeline stages whose output layer defers its weight gradient.
    A Python function replaces the fused CUDA kernel that this needs.
    """
    import copy

    from megatron.core import parallel_state

    kernel()
    model = bench(pp=2, **options)
    (chunk,) = model.chunks
    # A copy, because with this layer spec each ColumnParallelLinear would read the flag.
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

    with torch.no_grad():  # the inputs still require gradients, which a kernel would not see
        main_grad.add_(grad_output.t().matmul(total_input))


def output_weight(model: Any) -> Any:
    """Return the weight of a model's output layer on the last pipeline stage; None elsewhere."""
    layer = getattr(model.chunks[-1].module, "output_layer", None)
    return getattr(layer, "weight", None)
