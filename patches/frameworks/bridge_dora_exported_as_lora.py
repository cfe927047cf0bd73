"""Bridge exports DoRA as LoRA, without its magnitudes, silently.

Symptom:
    An export of a model with DoRA, merged or adapters alone, is a different model. Merged weights
    lack the magnitudes; `save_hf_adapter` writes `use_dora: true` without `lora_magnitude_vector`,
    and peft warns of the missing key and uses the rows' own norms. `export_adapter_ckpt` writes
    `use_dora: false`, so that peft does not even warn.

Cause:
    The conversion finds adapters by `.linear_in.weight` alone, and merges them with `LoRAMerge`.
    The code that reads a checkpoint's configuration knows only `LoRA` and `VLMLoRA`, and loads only
    their weights.

Affects:
    0.5 to main of August 2026, which export DoRA as LoRA from 0.3 on. What the patch does: it
    scales each merged row to its magnitude, adds magnitudes to the exports, and loads a checkpoint
    of `DoRA` as DoRA. Not covered: `examples/conversion/adapter/export_adapter.py` on GPUs, whose
    own code reads it as LoRA.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/conversion/peft_bridge.py

Remove when:
    Bridge exports `weight_magnitude`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, gathered, target

from . import _peft

_MAGNITUDE = ".lora_magnitude_vector"
_CONFIG = "run_config.yaml"


def plan(original: Original, self: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap Bridge's planning of an adapter export: also gather DoRA's magnitudes.
    All ranks of the model take part.
    """
    tasks = original(self, megatron_model, *args, **kwargs)
    several = isinstance(megatron_model, list)
    self._magnitudes = _by_weight(self, megatron_model if several else [megatron_model])
    return tasks


def merge(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap Bridge's merge of adapters: scale each merged row to its DoRA magnitude."""
    return _scaled(original(self, *args, **kwargs), self._magnitudes)


def _scaled(merged: dict[str, Any], magnitudes: dict[str, Any]) -> dict[str, Any]:
    for name, weight in list(merged.items()):
        if (length := magnitudes.get(name)) is not None:
            rows = weight.float()
            scale = length.to(rows) / rows.norm(dim=1)
            merged[name] = (scale[:, None] * rows).to(weight.dtype)
    return merged


def stream(original: Original, self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield the adapters' factors as Bridge does, and after a weight's factors its DoRA magnitudes.
    A magnitude is named as peft names it, with `lora_magnitude_vector`.
    """
    for pair in original(self, *args, **kwargs):
        yield pair
        name = pair[0].removesuffix(".lora_B.weight")
        length = self._magnitudes.get(f"{name}.weight")
        if name != pair[0] and length is not None:
            yield type(pair)(name + _MAGNITUDE, length.to(pair[1].device))


def ranks_of(original: Original, adapter_weights: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap Bridge's look-up of LoRA ranks: leave out DoRA's magnitudes, which have no LoRA rank."""
    factors = [pair for pair in adapter_weights if not pair[0].endswith(_MAGNITUDE)]
    return original(factors, *args, **kwargs)


def load_and_export(
    original: Original, self: Any, peft_checkpoint: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load an adapter checkpoint and export it, as DoRA if the checkpoint's run trained with DoRA.
    Bridge always exports it as LoRA.
    """
    folder = Path(peft_checkpoint).expanduser().resolve()
    files = [path for path in (folder / _CONFIG, folder.parent / _CONFIG) if path.exists()]
    if not files or "megatron.bridge.peft.dora.DoRA" not in files[0].read_text(encoding="utf-8"):
        return original(self, peft_checkpoint, *args, **kwargs)
    from megatron.bridge.peft import dora, lora

    lora_class, lora.LoRA = lora.LoRA, dora.DoRA  # upstream imports LoRA when it is called
    try:
        return original(self, peft_checkpoint, *args, **kwargs)
    finally:
        lora.LoRA = lora_class


def _by_weight(bridge: Any, chunks: list[Any]) -> dict[str, Any]:
    """Return Hugging Face weight name → DoRA's magnitudes, one for each row of the whole weight.
    They are gathered from tensor-, pipeline- and expert-parallel ranks, which all take part.
    """
    import torch
    from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    modules, by_prefix = unwrap_model(chunks), {}
    for stage, module in enumerate(modules):
        for name, layer in module.named_modules():
            adapter: Any = getattr(layer, "adapter", None)
            if hasattr(adapter, "get_weight_magnitude"):
                rows = adapter.get_weight_magnitude().detach()
                if not adapter.input_is_parallel and _peft.is_cut(adapter):
                    group = parallel_state.get_tensor_model_parallel_group()
                    rows = torch.cat(gathered(rows, group))
                name = _megatron_local_name_to_global(modules, module.config, name, stage)
                by_prefix[name] = rows.cpu()
    for group in (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    ):
        of_ranks: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(of_ranks, by_prefix, group=group)
        by_prefix = {name: rows for of_rank in of_ranks for name, rows in of_rank.items()}
    by_weight: dict[str, Any] = {}
    for prefix, rows in by_prefix.items():
        names = bridge._get_base_hf_param_names_for_adapter(
            bridge.mapping_registry(), prefix, None, ".weight"
        )
        parts = bridge._get_fused_adapter_linear_out_slices(modules, names, rows[:, None])
        parts = parts or {names[0]: rows[:, None]}
        by_weight |= {name: part[:, 0] for name, part in parts.items() if hasattr(part, "shape")}
    return by_weight


def reproduce() -> None:
    """Export a DoRA model as merged weights and as adapter factors; check one layer's magnitudes.
    They must equal the row norms of the merged weight, and be exported with the factors. Without
    the patch the factors come without magnitudes.
    """
    import torch

    bench = _peft.build("DoRA", {"tp": 2})
    layer = bench.chunks[0].module.decoder.layers[0].self_attention.linear_proj
    with torch.no_grad():
        layer.adapter.weight_magnitude.mul_(2)
    factors, merged = _peft.exported(bench.chunks)
    name = "model.layers.0.self_attn.o_proj"
    if not torch.allclose(merged[f"{name}.weight"].norm(dim=1), layer.adapter.weight_magnitude):
        raise Fault("a merged weight's rows do not have the lengths of their magnitudes")
    if not factors[name + _MAGNITUDE].equal(layer.adapter.weight_magnitude):
        raise Fault("the magnitudes are not exported")


PATCH = Patch(
    "Bridge exports DoRA without magnitudes, as if it were LoRA, silently",
    target(
        "bridge.models.conversion.peft_bridge:MegatronPeftBridge.build_adapter_conversion_tasks",
        plan,
        "self._megatron_global_adapters_info_all_pp_ranks(megatron_model)",
    ),
    target(
        "bridge.models.conversion.peft_bridge:MegatronPeftBridge._merge_lora_adapter_weights",
        merge,
        "self._merge_single_adapter_weight",
    ),
    target(
        "bridge.models.conversion.peft_bridge:MegatronPeftBridge.stream_adapter_weights_megatron_to_hf",
        stream,
        "self.build_adapter_conversion_tasks",
    ),
    target(
        "bridge.models.conversion.peft_bridge:infer_rank_pattern_from_adapter_weights",
        ranks_of,
        "_split_hf_lora_weight_name(name)",
    ),
    target(
        "bridge.models.conversion.auto_bridge:AutoBridge.export_adapter_ckpt",
        load_and_export,
        "peft_class(**peft_cfg)",
    ),
    since="0.5",
)
