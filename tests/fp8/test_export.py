"""A model's weights on their way to an engine: names, order, and what is refused."""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.fp8.blockwise import dequantize_blockwise, quantize_blockwise
from megatron_idempotent.fp8.export import Fp8Export

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (300, 256),
    f"{LAYER}input_layernorm.weight": (256,),
    f"{LAYER}self_attn.q_proj.weight": (256, 256),
    f"{LAYER}self_attn.q_proj.bias": (256,),
    f"{LAYER}self_attn.q_norm.weight": (64,),
    f"{LAYER}mlp.gate.weight": (8, 256),
    f"{LAYER}mlp.shared_expert_gate.weight": (1, 256),
    f"{LAYER}mlp.experts.0.gate_proj.weight": (100, 256),
    f"{LAYER}mlp.experts.gate_up_proj": (3, 256, 256),
    f"{LAYER}mlp.gate_up_proj.weight": (512, 256),
    f"{LAYER}linear_attn.conv1d.weight": (64, 1, 4),
    "model.visual.blocks.0.mlp.linear_fc1.weight": (128, 256),
    "model.norm.weight": (256,),
    "lm_head.weight": (300, 256),
}
QUANTIZED = [
    f"{LAYER}self_attn.q_proj.weight",
    f"{LAYER}mlp.experts.0.gate_proj.weight",
    f"{LAYER}mlp.experts.gate_up_proj",
    f"{LAYER}mlp.gate_up_proj.weight",
]


def model() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(name, torch.randn(shape).bfloat16()) for name, shape in SHAPES.items()]


def as_bytes(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, bytes]]:
    return [(name, tensor.flatten().view(torch.uint8).numpy().tobytes()) for name, tensor in pairs]


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_matrices_get_codes_and_scales_and_the_rest_passes_as_it_is(scales):
    export = Fp8Export(scales=scales, modules_to_not_convert=("visual",))
    given = dict(model())
    found = list(export.weights(given.items()))
    names = [name for name, _ in found]
    expected = []
    for name in SHAPES:
        expected += [name, f"{name}_scale_inv"] if name in QUANTIZED else [name]
    assert names == expected
    sent = dict(found)
    for name in SHAPES:
        if name in QUANTIZED:
            codes, scale_inv = quantize_blockwise(given[name], scales=scales)
            assert as_bytes([("", sent[name])]) == as_bytes([("", codes)])
            assert torch.equal(sent[f"{name}_scale_inv"], scale_inv)
            back = dequantize_blockwise(sent[name], sent[f"{name}_scale_inv"])
            assert (back - given[name]).norm() < 0.03 * given[name].norm()
        else:
            assert sent[name] is given[name]


def test_a_second_export_has_the_same_bytes_and_one_of_its_result_changes_nothing():
    export = Fp8Export(modules_to_not_convert=("visual",))
    first = list(export.weights(model()))
    assert as_bytes(list(export.weights(model()))) == as_bytes(first)
    again = list(export.weights(first))
    assert all(ours[1] is theirs[1] for ours, theirs in zip(again, first, strict=True))
    # In whichever order a scale and its codes come.
    backwards = list(export.weights(first[::-1]))
    assert as_bytes(backwards) == as_bytes(first[::-1])


def test_config_names_in_full_what_is_not_converted():
    export = Fp8Export(scales="ue8m0", modules_to_not_convert=("visual",))
    on_meta = [(name, torch.empty(shape, device="meta")) for name, shape in SHAPES.items()]
    config = export.quantization_config(on_meta)
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            "model.layers.0.linear_attn.conv1d",
            "model.layers.0.mlp.gate",
            "model.layers.0.mlp.shared_expert_gate",
            "model.visual.blocks.0.mlp.linear_fc1",
        ],
        "scale_fmt": "ue8m0",
    }
    assert "scale_fmt" not in Fp8Export().quantization_config([])
    # What was quantized elsewhere is converted, whatever its name.
    assert Fp8Export().quantization_config([("gate.weight", CODES)])["modules_to_not_convert"] == []
    # Of what was exported it is the same.
    exported = export.weights(model())
    assert export.quantization_config(exported) == config


def test_parts_of_names_are_left_out_and_not_parts_of_words():
    matrix = torch.ones(128, 128)
    export = Fp8Export(modules_to_not_convert=("layers.1", "o_proj"))
    for name, converted in {
        "model.layers.1.mlp.up_proj.weight": False,
        "model.layers.11.mlp.up_proj.weight": True,
        "model.layers.0.self_attn.o_proj.weight": False,
        "model.layers.0.self_attn.kv_a_o_proj.weight": True,
        "model.layers.0.mlp.gate_proj.weight": True,
        "model.layers.0.mlp.gate.weight": False,
        "model.layers.61.shared_head.head.weight": False,
    }.items():
        assert export.converts(name, matrix) is converted, name


ONES = torch.ones(256, 256, dtype=torch.bfloat16)
CODES, SCALE = quantize_blockwise(ONES)


@pytest.mark.parametrize(
    ("pairs", "texts"),
    [
        ([("a.weight", CODES)], ["a.weight is torch.float8_e4m3fn", "without a.weight_scale_inv"]),
        ([("a.weight_scale_inv", SCALE)], ["a.weight_scale_inv is there", "without a.weight in"]),
        (
            [("a.weight", CODES), ("a.weight_scale_inv", SCALE[:1])],
            ["a.weight got scales of shape (1, 2)", "(2, 2)"],
        ),
        (
            [("a.weight_scale_inv", SCALE[:1]), ("a.weight", CODES)],
            ["a.weight got scales of shape (1, 2)"],
        ),
        ([("a.weight", ONES), ("a.weight", ONES)], ["a.weight is given twice"]),
        ([("a.bias", ONES[0]), ("a.bias", ONES[0])], ["a.bias is given twice"]),
        (
            [("a.weight", ONES), ("a.weight_scale_inv", SCALE)],
            ["a.weight_scale_inv is given twice", "not quantized yet"],
        ),
        (
            [("a.weight_scale_inv", SCALE), ("a.weight", ONES)],
            ["a.weight_scale_inv is given twice"],
        ),
        ([("a.weight", ONES * torch.nan)], ["a.weight is nan at [0, 0]"]),
        (
            [("module.decoder.layers.0.mlp.linear_fc1.weight", ONES)],
            ["linear_fc1.weight is a name of Megatron's", "map"],
        ),
        ([("a.linear_qkv.weight", ONES)], ["a.linear_qkv.weight is a name of Megatron's"]),
        ([("a.qkv_proj.weight", ONES)], ["a.qkv_proj.weight has 256 rows", "'qkv_proj': (…)"]),
        (
            [("a.gate_up_proj.weight", ONES[:200])],
            ["a.gate_up_proj.weight is cut at row 100", "128"],
        ),
        ([("a.experts.gate_up_proj", ONES[None, :200])], ["cut at row 100"]),
    ],
)
def test_what_an_engine_would_read_wrongly_is_refused(pairs, texts):
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        list(Fp8Export().weights(pairs))
    assert all(text in str(told.value) for text in texts), str(told.value)


def test_fused_weights_whose_pieces_are_known_are_quantized_where_cuts_are_between_blocks():
    known = Fp8Export(pieces={"qkv_proj": (128, 64, 64)})
    with pytest.raises(ValueError, match=r"a\.qkv_proj\.weight is cut at row 192"):
        list(known.weights([("a.qkv_proj.weight", ONES)]))
    known = Fp8Export(pieces={"qkv_proj": (128, 128)})
    assert len(list(known.weights([("a.qkv_proj.weight", ONES)]))) == 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scales": "e8m0"}, "'e8m0'"),
        ({"modules_to_not_convert": "visual"}, "'visual'; allowed: a tuple"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        Fp8Export(**settings)
