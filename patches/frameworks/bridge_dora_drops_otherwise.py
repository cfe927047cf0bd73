"""Bridge's DoRA with dropout computes something other than DoRA, silently.

Symptom:
    With `DoRA(dropout=…)` above 0, outputs differ from DoRA's formula, which has a single dropped
    input, as soon as a step changes the magnitudes. In `linear_qkv` and `linear_fc1` of Transformer
    Engine, which normalize their input, outputs are far off; with sequence parallelism these layers
    raise.

Cause:
    `DoRALinear.forward` draws a second mask for the weight's part, though the formula has one input
    for both parts. It passes the difference of dropped and full input through the layer again: a
    layer that normalizes scales this difference up to length 1, and a layer with a bias adds the
    bias again.

Affects:
    0.3 to main of August 2026. What the patch does: it draws one mask, and computes the weight's
    part with the weight alone.

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
    """Run a DoRA layer; with dropout, its output follows DoRA's formula with one dropout mask."""
    adapter = self.adapter
    dropout = adapter.dropout
    if not (_peft.drops(adapter) and getattr(self, "_adapter_enabled", True)):
        return original(self, *args, **kwargs)
    adapter.dropout = recorder = _recording(dropout)
    try:
        result = original(self, *args, **kwargs)
    finally:
        adapter.dropout = dropout
    return _with_dropped_input(self, result, recorder.change)


def _with_dropped_input(layer: Any, result: Any, change: Any) -> Any:
    """Add (scale - 1) × weight × `change` to a DoRA layer's output, and return the result.
    `scale` is DoRA's magnitude divided by the weight's norm; `change` is the input after dropout
    minus the input before it.
    """
    output, bias = result
    scale = layer.adapter.get_weight_magnitude() / layer._get_weight_norm()
    return output + (scale - 1) * _of_weight(layer.to_wrap, change), bias


def _recording(dropout: Any) -> Any:
    from torch import nn

    class Recording(nn.Identity):  # upstream draws no second mask for an Identity
        def forward(self, x: Any) -> Any:
            dropped = dropout(x)
            self.change = dropped - x
            return dropped

    return Recording()


def _of_weight(layer: Any, x: Any) -> Any:
    """Return the product of a layer's weight and `x`, without the layer's bias and norm."""
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
    """Check that a DoRA layer with dropout follows DoRA's formula for one dropout mask.
    The layer runs once without and once with a norm before it. Without the patch an output differs
    from the formula.
    """
    import torch

    bench = _peft.build("DoRA", {}, config={"add_qkv_bias": True}, dropout=0.5)
    layer = bench.chunks[0].module.decoder.layers[0].self_attention.linear_qkv
    base = layer.to_wrap
    with torch.no_grad():
        layer.adapter.weight_magnitude.mul_(2)
        base.bias.fill_(1)
    for norm in (None, torch.nn.LayerNorm(base.weight.shape[1])):
        if norm is not None:
            layer.to_wrap = _peft.normalizing(base, norm)
        x = 3 * torch.randn(4, 2, base.weight.shape[1], generator=torch.Generator().manual_seed(5))
        full = x if norm is None else norm(x)
        torch.manual_seed(5)
        dropped = layer.adapter.dropout(full)
        inner, outer = layer.adapter.linear_in.weight, layer.adapter.linear_out.weight
        low = layer.scaling * dropped @ inner.T @ outer.T
        scale = layer.adapter.weight_magnitude / layer._get_weight_norm()
        right = (
            torch.nn.functional.linear(full, base.weight, base.bias)
            + (scale - 1) * (dropped @ base.weight.T)
            + scale * low
        )
        torch.manual_seed(5)
        if not torch.allclose(layer(x)[0], right):
            raise Fault(f"DoRA with dropout is not its formula, in a layer with the norm {norm}")


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
    loudness="both",
)
