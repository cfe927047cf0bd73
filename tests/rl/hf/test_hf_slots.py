"""Names and layouts that Megatron has with Transformer Engine, or had in old releases.

Those of its local layers are held by the models themselves, in test_hf_layouts.py.
"""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.rl.hf import Architecture, Lora
from megatron_idempotent.rl.hf.names import Names, Ranks, hf_shapes

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 51,
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DENSE = Architecture.of({**SIZES, "architectures": ["Qwen3ForCausalLM"]})
MOE = Architecture.of({**SIZES, "architectures": ["Qwen3MoeForCausalLM"]})
ONE = Ranks(0, 1, 0, 1)
LAYER = "model.layers.3."


def whole(arch: Architecture) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in hf_shapes(arch).items()}


def filled(slots, parameter, tensors):
    """A parameter that is put together out of what its slots say."""
    parameter = parameter.clone()
    for slot in slots:
        view = slot.view(parameter)
        for share in slot.shares():
            rows, at = tensors[share.name].narrow(share.dim, share.start, share.size), 0
            for start, size in share.segments:
                view.narrow(share.dim, start, size).copy_(rows.narrow(share.dim, at, size))
                at += size
    return parameter


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ],
)
def test_norms_that_are_fused_have_their_names(name, wanted):
    (slot,) = Names(DENSE, ONE).slots(f"decoder.layers.1.{name}", 24, layers=[2, 3])
    (share,) = slot.shares()
    assert share.name == LAYER + wanted


def test_experts_are_counted_among_all():
    tensors = whole(MOE)
    names = Names(MOE, Ranks(0, 1, 1, 2))
    expert = f"{LAYER}mlp.experts.3."
    gate, up, down = (tensors[f"{expert}{each}_proj.weight"] for each in ("gate", "up", "down"))
    for number, wanted in (("1", torch.cat([gate[10:], up[10:]])), ("2", down[:, 10:])):
        name = f"decoder.layers.0.mlp.experts.linear_fc{number}.weight1"
        slots = names.slots(name, len(wanted), layers=[3], experts=[2, 3])
        assert torch.equal(filled(slots, torch.zeros(wanted.shape), tensors), wanted)


def test_experts_in_one_weight_are_those_that_the_old_grouped_mlp_multiplies_by():
    tensors = whole(MOE)
    names = Names(MOE, ONE)
    weights = {}
    for number, shape in (("1", (24, 4 * 40)), ("2", (4 * 20, 24))):
        slots = names.slots(
            f"decoder.layers.0.mlp.experts.weight{number}", shape[0], layers=[3], experts=range(4)
        )
        assert len(slots) == 4
        weights[number] = filled(slots, torch.zeros(shape), tensors)
    weights, tensors = (
        {name: each.double() for name, each in group.items()} for group in (weights, tensors)
    )
    hidden = torch.randn(7, 24, dtype=torch.float64)
    for expert in range(4):
        # As its forward: grouped products with these views, and the halves of a chunk.
        first = hidden @ weights["1"].view(4, 24, -1)[expert]
        gate, up = first.chunk(2, dim=-1)
        second = weights["2"].view(4, -1, 24)[expert]
        at = f"{LAYER}mlp.experts.{expert}."
        assert torch.allclose(gate, hidden @ tensors[f"{at}gate_proj.weight"].T, rtol=0, atol=1e-12)
        assert torch.allclose(up, hidden @ tensors[f"{at}up_proj.weight"].T, rtol=0, atol=1e-12)
        assert torch.equal(second, tensors[f"{at}down_proj.weight"].T)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "mtp.layers.0.enorm.weight",
    ],
)
def test_what_the_checkpoint_has_not_is_nothing(name):
    assert Names(DENSE, ONE).slots(name, 24, layers=[3]) == ()
    if "linear_fc1.bias" not in name:
        assert Names(MOE, ONE).slots(name, 24, layers=[3], experts=range(4)) == ()


@pytest.mark.parametrize("settings", [{"rank": 0}, {"rank": 4, "layers": ("linear_q",)}])
def test_adapters_of_no_rank_or_in_no_known_layer_are_refused(settings):
    with pytest.raises(ValueError, match=r"allowed: 1 or more, and layers of linear_qkv"):
        Lora(**settings)
