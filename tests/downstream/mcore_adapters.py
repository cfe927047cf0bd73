"""mcore-bridge's own adapters in a chunk's module, with stand-ins for Transformer Engine's layers.

The layers compute with torch, and are shared and marked as Megatron's classes of these names do.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from megatron_idempotent.patches.frameworks import _peft, _standins


def put(module: Any, *, dim: int = 4, alpha: int = 8, **options: Any) -> None:
    """Freeze a chunk's module, and put mcore-bridge's own adapters into its linear layers.

    The layers, of the base too, are stand-ins for Transformer Engine's; Megatron decides by their
    marks which gradients it sums.
    """
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    for name, layer in _layers().items():
        setattr(engine, name, layer)
    module.requires_grad_(False)
    names = ("utils", "npu_lora", "lora")
    modules = _standins.import_all(
        "mcore_bridge.tuners", names, "transformer_engine", skip_missing=True
    )
    for name, layer in list(module.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
            adapted = modules["lora"].LoraParallelLinear(
                layer if hasattr(layer, "num_gemms") else _engines(layer),
                "default",
                r=dim,
                lora_alpha=alpha,
                **options,
            )
            setattr(module.get_submodule(parent), own, adapted)


def _engines(layer: Any) -> Any:
    """Return a stand-in for Transformer Engine's layer, with the weight of megatron-core's."""
    column = "Column" in type(layer).__name__
    made = _layers()["TEColumnParallelLinear" if column else "TERowParallelLinear"](
        layer.input_size, layer.output_size, config=layer.config, is_expert=layer.is_expert
    )
    made.weight, made.bias = layer.weight, layer.bias
    if layer.explicit_expert_comm:  # a shared expert whose communication is overlapped, too
        made.parallel_mode = None
    return made


@functools.cache
def _layers() -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from torch import nn

    class TELinear(nn.Module):
        mode: str | None = None

        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: Any,
            parallel_mode: str | None = None,
            is_expert: bool = False,
            **_: Any,
        ):
            super().__init__()
            self.config, self.is_expert = config, is_expert
            mode = self.mode or parallel_mode
            routed = parallel_state.get_expert_tensor_parallel_world_size()
            ranks = routed if is_expert else parallel_state.get_tensor_model_parallel_world_size()
            shape, cut = [output_size, input_size], {"column": 0, "row": 1}.get(mode or "")
            if cut is not None:
                shape[cut] //= ranks
            self.ranks = ranks
            self.out_features, self.in_features = shape
            weight: Any = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            groups = config.expert_model_parallel_size > 1 or (
                routed != config.tensor_model_parallel_size
            )
            weight.allreduce = not (is_expert and groups)
            weight.tensor_model_parallel = cut is not None
            if cut is not None:
                weight.partition_dim, weight.partition_stride = cut, 1
            if mode == "duplicated" and weight.allreduce:  # as Megatron has it from 0.13 on
                weight.sequence_parallel = config.sequence_parallel
            self.weight, self.bias = weight, None
            explicit = is_expert and (ranks > 1 or config.expert_model_parallel_size > 1)
            self.parallel_mode = None if explicit or cut is None else mode
            self.sequence_parallel = config.sequence_parallel and ranks > 1 and cut is not None

        def forward(self, x: Any) -> Any:
            mode = self.parallel_mode if self.ranks > 1 else None
            if mode == "column" and self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x)
            elif mode == "column":
                x = mappings.copy_to_tensor_model_parallel_region(x)
            output = nn.functional.linear(x, self.weight)
            if mode == "row" and self.sequence_parallel:
                output = mappings.reduce_scatter_to_sequence_parallel_region(output)
            elif mode == "row":
                output = mappings.reduce_from_tensor_model_parallel_region(output)
            return output, self.bias

    found: dict[str, Any] = {
        "TELinear": TELinear,
        "TELayerNormColumnParallelLinear": type("Fused", (), {}),
    }
    for kind in ("column", "row"):
        name = f"TE{kind.capitalize()}ParallelLinear"
        found[name] = type(name, (TELinear,), {"mode": kind})
    return _peft.grouped_layers() | found
