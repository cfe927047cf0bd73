"""The gradient norm counts a weight that tensor-parallel ranks replicate once for each rank.

Symptom:
    With multi-latent attention, Transformer Engine and tensor parallelism the gradient norm is too
    large and clipping too strong, for all parameters: at TP 8 up to 1.36 or 1.52 times, measured on
    DeepSeek's models. The number of zeros is too large as well. No error.

Cause:
    Transformer Engine's `Linear` marks each weight `tensor_model_parallel`, even if the layer has
    no parallel mode. Megatron makes such layers with `parallel_mode="duplicated"`, for the down
    projections of queries, keys and values, and keeps the mark. A marked parameter counts on each
    rank.

Affects:
    0.12 to 0.16, with Transformer Engine. What the patch does: it removes the mark from these
    weights before DDP wraps the model. No collective is added. Call `apply()` before DDP. Experts'
    layers and Megatron-FSDP are left as they are.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.17.0/megatron/core/extensions/transformer_engine.py
    removes the mark in `TELinear`. https://github.com/areal-project/AReaL/pull/1497 and
    https://github.com/ROCm/TransformerEngine/pull/715 report it.

Remove when:
    no supported release keeps the mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._case import Fault, Original, Patch, address, arguments, bench, counted, target


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DDP's constructor: first unmark weights of which each tensor-parallel rank has a copy.
    The mark `tensor_model_parallel` makes the gradient norm count the weight once per rank.
    """
    call = arguments(original, (self, *args), kwargs)
    if call["config"].tensor_model_parallel_size > 1:
        for layer in _duplicated_layers(call["module"]):
            layer.weight.tensor_model_parallel = False
    original(self, *args, **kwargs)


def _duplicated_layers(model: Any) -> Iterator[Any]:
    """Yield the layers of a model of which each tensor-parallel rank has a complete copy.

    Of Megatron's subclasses of `Linear` only `TELinear` itself is used for them. Experts have no
    parallel mode either, because Megatron splits them itself.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = list(model.modules())
    of_experts = {
        id(part)
        for layer in layers
        if isinstance(layer, MoELayer) and layer.experts is not None
        for part in layer.experts.modules()
    }
    for layer in layers:
        if type(layer).__name__ != "TELinear" or id(layer) in of_experts:
            continue
        if layer.parallel_mode is None and layer.tp_size == 1:
            yield layer


def reproduce() -> None:
    """Fill the gradient of a weight that two tensor-parallel ranks replicate with 1; take the norm.
    On stock Megatron the norm counts the weight once per rank.
    """
    from ._engine_layers import duplicated

    def add(module: Any) -> None:
        module.down_projection = duplicated(module.config, 16)

    model = bench(tp=2, dtype="bf16", overlap_grad_reduce=False, before_ddp=add)
    elements = model.chunks[0].module.down_projection.weight.numel()
    number = counted(model, "down_projection")
    if number != elements:
        raise Fault(f"the norm has {number} elements of a weight of {elements}")


PATCH = Patch(
    "the gradient norm counts weights that each tensor-parallel rank has whole once for each rank",
    target("ddp.__init__", init, "super().__init__(config=config, module=module)"),
    before="0.17",
    fixed_by=(
        (
            address("core.extensions.transformer_engine:TELinear.__init__"),
            "setattr(param, 'tensor_model_parallel', False)",
        ),
    ),
)
