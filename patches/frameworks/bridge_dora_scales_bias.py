"""Bridge's DoRA multiplies a layer's bias by the magnitudes, silently.

Symptom:
    From the first step on, the output of a layer that adds its bias itself, such as `linear_qkv` of
    Qwen2 with DoRA, differs from that of the merged weight and bias. The magnitudes' gradients are
    wrong, too.

Cause:
    `DoRALinear.forward` multiplies the output of the layer that it wraps, including the bias. DoRA
    divides a weight into magnitude and direction, and does not scale the bias; nor does peft.

Affects:
    0.2 to main of August 2026, for layers that do not return their bias to be added later. What the
    patch does: it subtracts the scaled bias, and adds the bias unscaled.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/dora_layers.py,
    `DoRALinear.forward`; https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/dora.py

Remove when:
    Bridge adds the bias after it has multiplied.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

from . import _peft


def compute(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a DoRA layer so that its magnitudes do not scale the layer's bias."""
    return _with_unscaled_bias(self, original(self, *args, **kwargs))


def _with_unscaled_bias(layer: Any, result: Any) -> Any:
    inside = getattr(layer.to_wrap, "bias", None)
    output, bias = result
    # A bias that the layer returns is added later.
    if bias is not None or inside is None or not getattr(layer, "_adapter_enabled", True):
        return result
    scale = layer.adapter.get_weight_magnitude() / layer._get_weight_norm()
    return output - (scale - 1) * inside, None


def reproduce() -> None:
    """Compare the output of a DoRA layer with a bias with that of its merged weight.
    Without the patch the magnitudes also multiply the bias.
    """
    import torch

    bench = _peft.build("DoRA", {}, config={"add_qkv_bias": True})
    layer = bench.chunks[0].module.decoder.layers[0].self_attention.linear_qkv
    inner, outer = layer.adapter.linear_in.weight, layer.adapter.linear_out.weight
    with torch.no_grad():
        layer.adapter.weight_magnitude.mul_(2)
        layer.to_wrap.bias.fill_(1)
    weight = layer.to_wrap.weight + layer.scaling * outer @ inner
    rows = layer.adapter.weight_magnitude / weight.norm(dim=1)
    x = torch.randn(4, 2, weight.shape[1], generator=torch.Generator().manual_seed(5))
    right = torch.nn.functional.linear(x, rows[:, None] * weight, layer.to_wrap.bias)
    if not torch.allclose(layer(x)[0], right):
        raise Fault("the output of a layer with DoRA differs from its merged weight and bias")


PATCH = Patch(
    "Bridge's DoRA multiplies a layer's bias by the magnitudes, silently",
    target(
        "peft.dora_layers:DoRALinear.forward",
        compute,
        "mag_norm_scale * (linear_output + adapter_output)",
    ),
    since="0.2",
    ranks=1,
)
