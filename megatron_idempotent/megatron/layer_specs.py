"""Builds models with upstream's local layer specs on any release, even with sequence parallelism.

Megatron's local spec falls back to `WrappedTorchNorm`, which refuses sequence parallelism only
because it leaves its weights unmarked: Megatron sums the gradients of parameters that carry
`sequence_parallel = True` over the tensor-parallel group. `MarkedNorm` marks them, as Apex's and
Transformer Engine's norms do. It goes into a layer spec, so upstream stays as it is.

Releases are told apart by their functions' signatures, so that commits between two releases, and
patched releases, work as well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch


def gpt_stage(
    config: Any,
    *,
    vp_stage: int | None,
    change_spec: Callable[[Any], Any] | None = None,
    fused: bool = False,
    **model: Any,
) -> Any:
    """Return a `GPTModel` for one pipeline stage, built from Megatron's local layer spec.
    With `fused` it is built from Transformer Engine's spec instead. `model` holds the other
    arguments of `GPTModel`.

    `change_spec` takes upstream's layer spec, and returns the one to use. If the config has
    `mtp_num_layers`, layers for multi-token prediction are built from the same spec, unless `model`
    has an `mtp_block_spec`. With `fused` the layers are Transformer Engine's, without changes.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    about_spec = {
        # Without it, the spec of 0.16 on asks for Transformer Engine's fused RMSNorm.
        "normalization": config.normalization,
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    make = (
        specs.get_gpt_layer_with_transformer_engine_spec
        if fused
        else specs.get_gpt_layer_local_spec
    )
    spec = make(**{name: v for name, v in about_spec.items() if takes(make, name)})
    if change_spec is not None:
        spec = change_spec(spec)
    if not fused and getattr(config, "mtp_num_layers", None) and "mtp_block_spec" not in model:
        model["mtp_block_spec"] = _mtp_block(spec, config, vp_stage)
    if not fused and config.sequence_parallel:
        spec = with_marked_norm(spec, config, vp_stage)
    if takes(GPTModel.__init__, "vp_stage"):  # before 0.13 the stage is a global
        model["vp_stage"] = vp_stage
    return GPTModel(config=config, transformer_layer_spec=spec, **model)


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether `function`, in the installed Megatron, takes a parameter `parameter`."""
    return parameter in inspect.signature(function).parameters


class MarkedNorm:
    """Creates torch's LayerNorm or RMSNorm, with parameters marked for sequence parallelism.

    Layer specs call it as a class.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> Any:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _mtp_block(layer_spec: Any, config: Any, vp_stage: int | None) -> Any:
    """Return the block spec of a pipeline stage's MTP layers; None for a stage without any."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    stage = {"vp_stage": vp_stage} if takes(get_gpt_mtp_block_spec, "vp_stage") else {}
    if config.sequence_parallel:
        layer_spec = _marked(layer_spec, config)
    block = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=False, **stage)
    if block is None or not config.sequence_parallel:
        return block
    block = copy.deepcopy(block)
    for mtp_spec in block.layer_specs:
        for norm in ("enorm", "hnorm", "layer_norm"):
            setattr(mtp_spec.submodules, norm, MarkedNorm)
    return block


def _marked(layer_spec: Any, config: Any) -> Any:
    layer_spec = copy.deepcopy(layer_spec)
    layer_spec.submodules.input_layernorm = MarkedNorm
    layer_spec.submodules.pre_mlp_layernorm = MarkedNorm
    if config.qk_layernorm:
        attention = layer_spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = MarkedNorm
    return layer_spec


def with_marked_norm(layer_spec: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the submodules of one pipeline stage's transformer block, for sequence parallelism.
    Each layer uses a copy of `layer_spec`. All norms, the final one included, are `MarkedNorm`s.
    """
    from megatron.core.transformer import transformer_block

    layer_spec = _marked(layer_spec, config)
    # Before 0.13 the function that counts layers has no parameter for the virtual stage.
    count = transformer_block.get_num_layers_to_build
    asks = "vp_stage" in count.__code__.co_varnames
    num_layers = count(config, vp_stage=vp_stage) if asks else count(config)
    return transformer_block.TransformerBlockSubmodules(
        layer_specs=[layer_spec] * num_layers, layer_norm=MarkedNorm
    )
