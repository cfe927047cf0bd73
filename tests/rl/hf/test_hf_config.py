"""Reads config.json as releases of transformers write it, and refuses what cannot be built."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_idempotent.rl.hf import Architecture, CheckpointDamaged, UnsupportedArchitecture

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 51,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def of(base: dict[str, Any] = LLAMA, **changes: Any) -> Architecture:
    return Architecture.of({**base, **changes})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": None, "type": "llama3"}},
    ],
)
def test_rotary_embeddings_are_read_as_old_and_new_releases_write_them(rope):
    arch = of(**rope)
    assert (arch.rope_theta, arch.rope_factor) == (5e5, 8.0)


def test_the_length_that_llama3_was_trained_with_is_its_longest_where_none_is_named():
    rope = {name: value for name, value in LLAMA3.items() if not name.startswith("original")}
    assert of(rope_parameters=rope, max_position_embeddings=8192).rope_factor == 8.0
    with pytest.raises(UnsupportedArchitecture, match="original_max_position_embeddings=4096"):
        of(rope_parameters=rope, max_position_embeddings=4096)


def test_rotary_embeddings_that_are_not_scaled_have_no_factor():
    assert (of().rope_theta, of().rope_factor) == (10_000.0, None)
    arch = of(rope_theta=1e6, rope_scaling=None)
    assert (arch.rope_theta, arch.rope_factor) == (1e6, None)


def test_the_type_of_weights_has_two_names():
    assert of(dtype="bfloat16").dtype is torch.bfloat16
    assert of(torch_dtype="float16").dtype is torch.float16
    assert of().dtype is torch.float32


def test_an_absent_head_dim_is_what_the_model_makes_of_it():
    assert of().head_dim == 6
    assert of(head_dim=None).head_dim == 6
    assert of(head_dim=10).head_dim == 10
    assert of(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert of(MOE).head_dim == 6


def test_absent_key_value_heads_are_as_many_as_heads():
    assert of(num_key_value_heads=None).query_groups == 4


def test_the_number_of_experts_has_two_names():
    arch = of(MOE, num_experts=None, num_local_experts=8)
    assert arch == of(MOE)
    assert (arch.experts, arch.experts_per_token, arch.expert_ffn) == (8, 2, 20)
    assert not arch.normalize_expert_weights
    assert of(MOE, norm_topk_prob=True).normalize_expert_weights


def test_biases_and_norms_are_those_of_the_family():
    found = {
        name: (of(architectures=[name]).qkv_bias, of(architectures=[name]).qk_norm)
        for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    }
    assert list(found.values()) == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"architectures=\['GemmaForCausalLM'\]"),
        ({"architectures": None}, r"architectures=\[\]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 and num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 8.0}}, "high_freq_factor=8.0"),
        (
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}},
            "original_max_position_embeddings=4096",
        ),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "factor=None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window=8 from layer 1 on",
        ),
    ],
)
def test_what_megatron_does_not_compute_is_refused(changes, said):
    with pytest.raises(UnsupportedArchitecture, match=said):
        of(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob=True"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8 from layer 0 on"),
    ],
)
def test_experts_that_megatron_does_not_compute_are_refused(changes, said):
    with pytest.raises(UnsupportedArchitecture, match=said):
        of(MOE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 8},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_no_reason(changes):
    assert of(**changes) == of()


def test_all_reasons_come_in_one_error():
    with pytest.raises(UnsupportedArchitecture) as caught:
        of(hidden_act="gelu", mlp_bias=True, rope_scaling={"type": "linear"}, vocab_size=None)
    for said in ("hidden_act", "mlp_bias", "rope_type", "vocab_size"):
        assert said in str(caught.value)


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    with pytest.raises(CheckpointDamaged, match=r"config.json does not exist"):
        Architecture.read(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-20])
    with pytest.raises(CheckpointDamaged, match=r"config.json cannot be read as JSON"):
        Architecture.read(tmp_path)
    path.write_text("[]")
    with pytest.raises(CheckpointDamaged, match="holds list, not an object"):
        Architecture.read(tmp_path)
    path.write_text(json.dumps(LLAMA))
    assert Architecture.read(tmp_path) == of()


def test_the_vocabulary_is_padded_to_a_multiple():
    assert [of().padded_vocab_size(ranks) for ranks in (1, 2, 4)] == [51, 52, 52]
    assert of().padded_vocab_size(2, divisible_by=64) == 128


def test_a_rotary_base_that_the_command_line_does_not_take_is_an_error():
    with pytest.raises(ValueError, match=r"rope_theta is 10000\.5"):
        of(rope_theta=10000.5).megatron_arguments()
