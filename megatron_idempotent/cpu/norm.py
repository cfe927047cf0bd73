"""A normalisation that allows sequence parallelism. Imports torch.

Megatron's local spec falls back to `WrappedTorchNorm`, which refuses sequence parallelism only
because it leaves its weights unmarked: Megatron sums the gradients of parameters that carry
`sequence_parallel = True` over the tensor-parallel group. This one marks them, as Apex's and
Transformer Engine's norms do. It goes into a layer spec, so upstream stays as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class MarkedNorm:
    """Called as a class by layer specs; gives torch's norm that `config.normalization` names."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> Any:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def with_marked_norm(layer_spec: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Block submodules of one pipeline stage: `layer_spec` with MarkedNorm for every norm."""
    from megatron.core.transformer import transformer_block

    layer_spec = copy.deepcopy(layer_spec)
    layer_spec.submodules.input_layernorm = MarkedNorm
    layer_spec.submodules.pre_mlp_layernorm = MarkedNorm
    # Releases before 0.12 count the layers without asking for the virtual stage.
    count = transformer_block.get_num_layers_to_build
    asks = "vp_stage" in count.__code__.co_varnames
    num_layers = count(config, vp_stage=vp_stage) if asks else count(config)
    return transformer_block.TransformerBlockSubmodules(
        layer_specs=[layer_spec] * num_layers, layer_norm=MarkedNorm
    )
