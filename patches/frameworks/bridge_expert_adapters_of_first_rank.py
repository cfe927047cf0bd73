"""Bridge's exports have only the first expert-parallel rank's adapters, silently.

Symptom:
    With experts one by one (`local_experts`) and `expert_model_parallel_size` above 1, an export of
    the adapters lacks those of other ranks' experts. A merged export adds the first rank's adapters
    to the other ranks' experts; and each rank's export is different. The base alone is right.

Cause:
    `_megatron_local_name_to_global` keeps the rank's local numbers of experts in names of adapters,
    and `megatron_to_hf` does not gather adapters, while it gathers the weights that they belong to.

Affects:
    0.5 to main of August 2026. Adapters of grouped experts are gathered. What the patch does: it
    numbers adapters like the weights, merges each expert with its own adapter, and exports all
    adapters.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/conversion/peft_bridge.py,
    `_megatron_global_adapters_info_all_pp_ranks`

Remove when:
    Bridge gathers the adapters of experts one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, gathered, target

from . import _peft

_ONE_BY_ONE = re.compile(r"(?<=\.local_experts\.)\d+")
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+")


def list_adapters(
    original: Original, self: Any, megatron_model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return Bridge's list of adapters, with experts' numbers in the model, not on this rank.
    The numbers are in the adapters' names.
    """
    from megatron.core.utils import unwrap_model

    chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
    first, _ = _experts(unwrap_model(chunks)[0].config)
    adapters = []
    for name, local_name, *more in original(self, megatron_model, *args, **kwargs):
        if number := _ONE_BY_ONE.search(local_name):
            name = _ONE_BY_ONE.sub(str(int(number[0]) + first), name)
        adapters.append((name, local_name, *more))
    return adapters


def merge(
    original: Original,
    self: Any,
    megatron_model: list[Any],
    converted_weights_dict: dict[str, Any],
    adapter_weights: list[Any],
) -> Any:
    """Merge each expert's weights with the factors from the rank that holds the expert.
    All expert-parallel ranks take part, with one gather for each factor.
    """
    from dataclasses import replace

    _, per_rank = _experts(megatron_model[0].config)
    apart = per_rank and _ONE_BY_ONE.search(adapter_weights[0].global_base_prefix)
    if not (apart and converted_weights_dict):
        return original(self, megatron_model, converted_weights_dict, adapter_weights)
    sides = ("linear_in_weight", "linear_out_weight")
    both = [[getattr(adapter, side) for side in sides] for adapter in adapter_weights]
    factors = [[_of_ranks(factor.weight) for factor in pair] for pair in both]
    merged: dict[str, Any] = {}
    for rank in range(len(factors[0][0])):
        weights = {
            name: weight
            for name, weight in converted_weights_dict.items()
            if self._infer_hf_expert_idx(name) // per_rank == rank
        }
        of_rank = []
        for adapter, pair, gathered_pair in zip(adapter_weights, both, factors, strict=True):
            new = [a._replace(weight=b[rank]) for a, b in zip(pair, gathered_pair, strict=True)]
            of_rank.append(replace(adapter, **dict(zip(sides, new, strict=True))))
        merged |= original(self, megatron_model, weights, of_rank)
    return merged


def stream(
    original: Original,
    self: Any,
    megatron_model: Any,
    cpu: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Iterator[Any]:
    """Yield the adapters' factors, with those of the experts on all expert-parallel ranks.
    All these ranks take part, with one gather for each factor.
    """
    chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
    first, per_rank = _experts(chunks[0].config)
    adapters = self._megatron_global_adapters_info_all_pp_ranks(chunks)
    if not (per_rank and any(_ONE_BY_ONE.search(adapter[0]) for adapter in adapters)):
        yield from original(self, megatron_model, cpu, *args, **kwargs)
        return
    # Gather tensors on their device, before they go to the CPU.
    for pair in original(self, megatron_model, False, *args, **kwargs):
        name, weight = pair
        number = _EXPERT.search(name)
        for rank, value in enumerate(_of_ranks(weight) if number else [weight]):
            if number:
                name = _EXPERT.sub(str(int(number[0]) - first + rank * per_rank), name)
            yield type(pair)(name, value.cpu() if cpu else value)


def _experts(config: Any) -> tuple[int, int]:
    """Return the number in the model of this rank's first expert, and how many experts a rank has.
    Return (0, 0) if each rank has all experts, or the model has none.
    """
    from megatron.core import parallel_state as ps

    ranks = ps.get_expert_model_parallel_world_size()
    if not config.num_moe_experts or ranks == 1:
        return 0, 0
    per_rank = config.num_moe_experts // ranks
    return per_rank * ps.get_expert_model_parallel_rank(), per_rank


def _of_ranks(weight: Any) -> Any:
    from megatron.core import parallel_state

    return gathered(weight, parallel_state.get_expert_model_parallel_group())


def reproduce() -> None:
    """Export a model's adapters, and a merged model, on two expert-parallel ranks.
    Without the patch both exports have the first rank's adapters only.
    """
    import torch
    from megatron.core import parallel_state

    bench = _peft.build("LoRA", {"experts": 2, "ep": 2})
    layer = bench.chunks[0].module.decoder.layers[0].mlp.experts.local_experts[0].linear_fc2
    factors, merged = _peft.exported(bench.chunks)
    prefix = f"model.layers.0.mlp.experts.{parallel_state.get_expert_model_parallel_rank()}"
    factor = factors.get(f"{prefix}.down_proj.lora_A.weight")
    if factor is None or not factor.equal(layer.adapter.linear_in.weight):
        raise Fault("the factors of an expert are not exported")
    adapter = layer.adapter
    product = adapter.linear_out.weight @ adapter.linear_in.weight * adapter.alpha / adapter.dim
    if not torch.allclose(merged[f"{prefix}.down_proj.weight"], layer.to_wrap.weight + product):
        raise Fault("an expert is merged with the factors of another")


_BRIDGE = "bridge.models.conversion.peft_bridge:MegatronPeftBridge."
PATCH = Patch(
    "Bridge's exports have the first expert-parallel rank's adapters alone, for experts one by one",
    target(
        f"{_BRIDGE}_megatron_global_adapters_info_all_pp_ranks",
        list_adapters,
        "_megatron_local_name_to_global",
    ),
    target(f"{_BRIDGE}_merge_lora_adapter_weights", merge, "self._merge_single_adapter_weight"),
    target(
        f"{_BRIDGE}stream_adapter_weights_megatron_to_hf",
        stream,
        "self.materialize_adapter_weights([adapter_task])[0]",
    ),
    since="0.5",
)
