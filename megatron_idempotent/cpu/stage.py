"""One pipeline stage of a GPT with upstream's local layer spec, on any release.

What differs between releases is probed by signature, so that a release in between, or a patched
one, needs no entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def gpt_stage(config: Any, *, vp_stage: int | None, **model: Any) -> Any:
    """A `GPTModel`; `model` holds its other arguments, `vocab_size` and so on."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_idempotent.cpu.norm import with_marked_norm

    about_spec = {
        # Without it, the spec of 0.16 on asks for Transformer Engine's fused RMSNorm.
        "normalization": config.normalization,
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": False,
    }
    spec = get_gpt_layer_local_spec(
        **{name: v for name, v in about_spec.items() if takes(get_gpt_layer_local_spec, name)}
    )
    if config.sequence_parallel:
        spec = with_marked_norm(spec, config, vp_stage)
    if takes(GPTModel.__init__, "vp_stage"):  # before 0.13 the stage is a global
        model["vp_stage"] = vp_stage
    return GPTModel(config=config, transformer_layer_spec=spec, **model)


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether this release's `function` has the parameter."""
    return parameter in inspect.signature(function).parameters
