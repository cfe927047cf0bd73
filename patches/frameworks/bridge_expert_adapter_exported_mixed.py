"""Bridge's export of experts' adapters mixes gate and up if ranks share experts, silently.

Symptom:
    With `expert_tensor_parallel_size` above 1, merged weights of experts and exported adapters have
    rows of gate in `up_proj`, and vice versa. The base alone is exported correctly.

Cause:
    Each rank has rows of gate and rows of up, one part after the other.
    `_split_fused_fc1_linear_out_weight` assumes that one rank holds an expert.

Affects:
    0.5 to main of August 2026. What the patch does: it splits each rank's part into its halves.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/conversion/peft_bridge.py,
    `_split_fused_fc1_linear_out_weight`

Remove when:
    Bridge uses the size of the expert's group.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import (
    Fault,
    Original,
    Patch,
    arguments,
    no_body_has,
    target,
)

from . import _peft

_SIZE = "1 if is_expert else parallel_state.get_tensor_model_parallel_world_size()"


def split(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap Bridge's split of an expert's fused `linear_out` weight into gate and up.
    The weight is joined from expert-tensor-parallel ranks' parts, each with gate rows, then up
    rows. Split each part, then join the gates and the ups.
    """
    import torch
    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_tensor_parallel_world_size()
    call = arguments(original, args, kwargs)
    if not call["is_expert"] or ranks == 1:
        return original(*args, **kwargs)
    halves = [part.chunk(2) for part in call["linear_out_weight"].chunk(ranks)]
    return tuple(torch.cat(parts) for parts in zip(*halves, strict=True))


def reproduce() -> None:
    """Export the adapter of an expert that two tensor-parallel ranks share.
    Without the patch rows of gate are in `up_proj`, and vice versa.
    """
    bench = _peft.build("LoRA", {"tp": 2, "sequence_parallel": True, "experts": 2, "etp": 2})
    expert = bench.chunks[0].module.decoder.layers[0].mlp.experts.local_experts[0]
    halves = expert.linear_fc1.adapter.linear_out.weight.chunk(2)
    factors, _ = _peft.exported(bench.chunks)
    rank = expert.linear_fc1.adapter.linear_out.tp_group.rank()
    for name, rows in zip(("gate", "up"), halves, strict=True):
        factor = factors[f"model.layers.0.mlp.experts.0.{name}_proj.lora_B.weight"]
        if not factor.chunk(2)[rank].equal(rows):
            raise Fault(f"{name}_proj of an expert is exported with other rows")


PATCH = Patch(
    "Bridge's export of experts' adapters mixes gate and up under expert-tensor parallelism",
    target(
        "bridge.models.conversion.peft_bridge:"
        "MegatronPeftBridge._split_fused_fc1_linear_out_weight",
        split,
        _SIZE,
    ),
    since="0.5",
    fixed_when=no_body_has(_SIZE),
)
