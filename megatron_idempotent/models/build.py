"""A pipeline stage of Megatron's GPTModel that computes what a checkpoint's model does."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from typing import Any

from .families import Architecture


def build_gpt(
    arch: Architecture,
    config: Any,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    vocab_divisible_by: int = 1,
    max_positions: int | None = None,
    layer_spec: Any = None,
    **model: Any,
) -> Any:
    """One stage of a `GPTModel`, with random weights; `load_hf` puts in the checkpoint's.

    Args:
        arch: the checkpoint's model.
        config: of `arch.transformer_config()`.
        pre_process: whether the stage has the embedding.
        post_process: whether the stage has the last norm and the output layer.
        vp_stage: of an interleaved schedule. Before 0.13 it is a global that the caller sets.
        vocab_divisible_by: the vocabulary is padded to a multiple of this x tensor parallel ranks.
        max_positions: longest sequence, where that is not the checkpoint's.
        layer_spec: the layers' modules; otherwise Transformer Engine's where it is installed, and
            Megatron's own where it is not.
        model: other arguments of GPTModel, such as `parallel_output`.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    # Before 0.13 the stage is a global.
    stage = {"vp_stage": vp_stage} if _takes(GPTModel.__init__, "vp_stage") else {}
    scaling: dict[str, Any] = {}
    if arch.rope_factor is not None:
        scaling = {"rope_scaling": True, "rope_scaling_factor": arch.rope_factor}
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec or _layer_spec(config, vp_stage),
        vocab_size=arch.padded_vocab_size(
            config.tensor_model_parallel_size, divisible_by=vocab_divisible_by
        ),
        max_sequence_length=max_positions or arch.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        **{**scaling, **stage, **model},
    )


def _layer_spec(config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    about = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        # Without it, the local spec of 0.16 on asks for Transformer Engine's fused RMSNorm.
        "normalization": config.normalization,
    }
    fused = importlib.util.find_spec("transformer_engine") is not None
    make = (
        specs.get_gpt_layer_with_transformer_engine_spec
        if fused
        else specs.get_gpt_layer_local_spec
    )
    spec = make(**{name: value for name, value in about.items() if _takes(make, name)})
    if fused or not config.sequence_parallel:
        return spec
    return _for_sequence_parallel(spec, config, vp_stage)


def _for_sequence_parallel(spec: Any, config: Any, vp_stage: int | None) -> Any:
    """Torch's norms with the mark by which Megatron sums their gradients over sequence shards."""
    from megatron_idempotent.megatron.layer_specs import MarkedNorm, with_marked_norm

    spec = copy.deepcopy(spec)
    if config.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = MarkedNorm
    return with_marked_norm(spec, config, vp_stage)


def _takes(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters
