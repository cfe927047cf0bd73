"""A factor of ms-swift's LoRA that tensor-parallel ranks replicate drifts apart between them.

Symptom:
    With tensor and sequence parallelism LoRA trains, but its replicated factor differs between
    ranks: `lora_B` of `linear_proj` and `linear_fc2`, `lora_A` of `linear_qkv` and `linear_fc1`,
    and both factors of replicated layers. An export saves the first rank's. No error.

Cause:
    With sequence parallelism a rank has a part of the tokens, and Megatron sums gradients over
    ranks for parameters that are marked `sequence_parallel`. mcore-bridge lost the mark in 1.4.

Affects:
    mcore-bridge 1.4 to 1.6.2, and ms-swift 4.2 to 4.5.2 with these; right up to 1.3.2. What the
    patch does: parameters of the replicated factor are marked when they are created. Tested with
    1.6.2's own method and Megatron's own layers, because Transformer Engine's need CUDA. Factors
    that were trained without the patch stay different: go back to a checkpoint of one of the right
    releases.

Upstream:
    https://github.com/modelscope/mcore-bridge/pull/173, in 1.6.3.

Remove when:
    1.6.2 is no longer supported.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from megatron_idempotent.patches._case import (
    Fault,
    Original,
    Patch,
    a_body_has,
    bench,
    gathered,
    target,
)

from . import _standins

_MODULE = "mcore_bridge.tuners.lora"
_LAYER = "decoder.layers.0.mlp.linear_fc2"


def update_layer(
    original: Original, self: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    """Create an adapter's two factors; mark the one that ranks replicate as `sequence_parallel`.
    Megatron then sums that factor's gradient over tensor-parallel ranks.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    original(self, adapter_name, *args, **kwargs)
    in_parts = getattr(self.config, "sequence_parallel", False) or self.sequence_parallel
    if self.tp_size == 1 or not in_parts or isinstance(self.base_layer, TopKRouter):
        return
    factors = self.lora_B if self.is_parallel_a else self.lora_A
    for parameter in factors[adapter_name].parameters():
        parameter.sequence_parallel = True


def reproduce() -> None:
    """Train an adapter of a row-parallel layer on two ranks, and compare the ranks' second factors.
    Without the patch these copies differ.
    """
    model = bench(tp=2, sequence_parallel=True, overlap_grad_reduce=False, before_ddp=_add_adapter)
    model.train_step(1, data_seed=0)
    factor = model.chunks[0].module.get_parameter(f"{_LAYER}.lora_B.weight")
    first, second = gathered(factor.data)
    if not first.equal(second):
        raise Fault("lora_B of linear_fc2 differs between tensor-parallel ranks after a step")


def _add_adapter(module: Any) -> None:
    """Add an adapter to a layer of a tiny model with mcore-bridge's own method."""
    import torch

    base = module.get_submodule(_LAYER)
    base.parallel_mode = "row"
    adapter = SimpleNamespace(
        **{name: {} for name in ("r", "lora_alpha", "lora_dropout", "scaling", "lora_A", "lora_B")},
        config=base.config,
        base_layer=base,
        is_expert=False,
        is_grouped=False,
        is_parallel_a=True,
        sequence_parallel=True,
        tp_size=2,
        in_features=base.weight.shape[1],
        out_features=base.weight.shape[0],
        active_adapters=["default"],
        set_adapter=_nothing,
        _move_adapter_to_device_of_base_layer=_nothing,
    )
    settings = {"lora_dropout": 0.0, "init_lora_weights": False, "use_rslora": False}
    _bridge().LoraParallelLinear.update_layer(
        adapter, "default", 4, lora_alpha=4, lora_bias=False, **settings
    )
    base.lora_A, base.lora_B = adapter.lora_A["default"], adapter.lora_B["default"]
    torch.nn.init.zeros_(base.lora_B.weight)

    def add(layer: Any, inputs: Any, outputs: Any) -> Any:
        output, bias = outputs
        return output + layer.lora_B(layer.lora_A(inputs[0])[0])[0], bias

    base.register_forward_hook(add)


def _nothing(_: Any) -> None:
    """Do nothing; it replaces a peft method that is not needed here."""


def _bridge() -> Any:
    """Import mcore-bridge's LoRA module, and replace the layers of Transformer Engine in it, which
    need CUDA. Stand-ins replace peft, transformers and the rest of mcore-bridge.

    TERowParallelLinear becomes Megatron's RowParallelLinear, and TELinear a torch.nn.Linear. The
    column-parallel layers become empty classes: the adapter here creates none.
    """
    import torch
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    _standins.replace("peft", "transformers")
    vars(importlib.import_module("peft"))["__version__"] = "0.18.0"
    module = _standins.import_alone(_MODULE)

    class Replicated(torch.nn.Linear):
        def __init__(self, input_size: int, output_size: int, bias: bool, **_: Any) -> None:
            super().__init__(input_size, output_size, bias)

        def forward(self, x: Any) -> Any:
            return super().forward(x), None

    module.TELinear, module.TERowParallelLinear = Replicated, RowParallelLinear
    module.is_torch_npu_available = lambda: False
    for name in ("Column", "LayerNormColumn"):
        setattr(module, f"TE{name}ParallelLinear", type(name, (), {}))
    return module


PATCH = Patch(
    "LoRA's factor that tensor-parallel ranks share drifts between them in ms-swift",
    target(
        f"{_MODULE}:LoraParallelLinear.update_layer",
        update_layer,
        "self.lora_A[adapter_name] = lora_a",
        "self.lora_B[adapter_name] = lora_b",
    ),
    since="1.4",
    before="1.6.3",
    fixed_when=a_body_has("p.sequence_parallel = True"),
)
