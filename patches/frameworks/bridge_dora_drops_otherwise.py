"""Bridge's DoRA with dropout drops otherwise than DoRA does, silently.

Symptom:
    With `DoRA(dropout=…)` above 0, outputs are not those of one dropped input from the step on that
    moves the magnitudes. In `linear_qkv` and `linear_fc1` of Transformer Engine's kind, which
    normalize their input, they are far off; with sequence parallelism that raises.

Cause:
    `DoRALinear.forward` draws a second mask, for the weight's part, though its formula has one
    input for both. It passes the difference of dropped and whole input through the layer again:
    one that normalizes scales that up to length 1, and one that adds its bias adds it once more.

Affects:
    0.3 to main of August 2026. What the patch does: it draws one mask, and computes the weight's
    part by the weight alone.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/dora_layers.py,
    `DoRALinear.forward`; https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/dora.py

Remove when:
    Bridge keeps the dropped input, and multiplies it by the weight.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

from . import _peft


def compute(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the layer without dropout but in its adapter, and add what that takes off."""
    adapter = self.adapter
    dropout = adapter.dropout
    if not (_peft.drops(adapter) and getattr(self, "_adapter_enabled", True)):
        return original(self, *args, **kwargs)
    adapter.dropout = kept = _once(dropout)
    try:
        found = original(self, *args, **kwargs)
    finally:
        adapter.dropout = dropout
    return _of_dropped(self, found, kept.taken)


def _of_dropped(layer: Any, found: Any, taken: Any) -> Any:
    output, bias = found
    scale = layer.adapter.get_weight_magnitude() / layer._get_weight_norm()
    return output + (scale - 1) * _of_weight(layer.to_wrap, taken), bias


def _once(dropout: Any) -> Any:
    from torch import nn

    class Once(nn.Identity):  # of which upstream asks whether there is a second mask to draw
        def forward(self, x: Any) -> Any:
            dropped = dropout(x)
            self.taken = dropped - x
            return dropped

    return Once()


def _of_weight(layer: Any, x: Any) -> Any:
    """Return the product of a layer's weight and x, without bias, and without its own norm."""
    if not hasattr(layer, "return_layernorm_output"):
        output, bias = layer(x)
        inside = layer.bias if bias is None else None
        return output if inside is None else output - inside
    from megatron.core.tensor_parallel import mappings
    from torch.nn.functional import linear

    if not layer.config.sequence_parallel:
        x = mappings.copy_to_tensor_model_parallel_region(x)
    elif not layer.return_layernorm_output_gathered:
        x = mappings.gather_from_sequence_parallel_region(x)
    return linear(x, layer.weight)


def reproduce() -> None:
    """Compare layers, one of which normalizes, with DoRA's formula of one mask."""
    import torch

    bench = _peft.build("DoRA", {}, config={"add_qkv_bias": True}, dropout=0.5)
    layer = bench.chunks[0].module.decoder.layers[0].self_attention.linear_qkv
    own = layer.to_wrap
    with torch.no_grad():
        layer.adapter.weight_magnitude.mul_(2)
        own.bias.fill_(1)
    for norm in (None, torch.nn.LayerNorm(own.weight.shape[1])):
        if norm is not None:
            layer.to_wrap = _peft.normalizing(own, norm)
        x = 3 * torch.randn(4, 2, own.weight.shape[1], generator=torch.Generator().manual_seed(5))
        whole = x if norm is None else norm(x)
        torch.manual_seed(5)
        dropped = layer.adapter.dropout(whole)
        inner, outer = (each.weight for each in (layer.adapter.linear_in, layer.adapter.linear_out))
        low = layer.scaling * dropped @ inner.T @ outer.T
        scale = layer.adapter.weight_magnitude / layer._get_weight_norm()
        right = (
            torch.nn.functional.linear(whole, own.weight, own.bias)
            + (scale - 1) * (dropped @ own.weight.T)
            + scale * low
        )
        torch.manual_seed(5)
        if not torch.allclose(layer(x)[0], right):
            raise Fault(f"DoRA has dropped otherwise, in a layer with the norm {norm}")


PATCH = Patch(
    "Bridge's DoRA drops inputs twice, and of layers that normalize something else, silently",
    target(
        "peft.dora_layers:DoRALinear.forward",
        compute,
        "isinstance(self.adapter.dropout, nn.Identity)",
        "self.adapter.dropout(layernorm_output) - layernorm_output",
    ),
    since="0.3",
    ranks=1,
)
