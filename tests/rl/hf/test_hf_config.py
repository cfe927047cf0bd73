"""Reads config.json as releases of transformers write it, and refuses what cannot be built."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_idempotent.rl.hf import Architecture, CheckpointDamaged, UnsupportedArchitecture
from megatron_idempotent.rl.hf.config import SUPPORTED
from megatron_idempotent.rl.weights import WeightsError

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


OLD = {**LLAMA3, "rope_type": None, "type": "llama3"}
UNNAMED = {name: value for name, value in LLAMA3.items() if not name.startswith("original")}
SCALED = {"rope_theta": 5e5, "rope_factor": 8.0}
NO_LAYER_SLIDES = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("base", "changes", "wanted"),
    [
        (LLAMA, {}, {"rope_theta": 10_000.0, "rope_factor": None, "dtype": torch.float32}),
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, SCALED),
        (LLAMA, {"rope_theta": 5e5, "rope_scaling": LLAMA3}, SCALED),
        (LLAMA, {"rope_theta": 5e5, "rope_scaling": OLD}, SCALED),
        (LLAMA, {"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1e6}),
        # The length that Llama 3 was trained with is its longest where none is named.
        (
            LLAMA,
            {"rope_parameters": UNNAMED, "max_position_embeddings": 8192},
            {"rope_factor": 8.0},
        ),
        (LLAMA, {"dtype": "bfloat16"}, {"dtype": torch.bfloat16}),
        (LLAMA, {"torch_dtype": "float16"}, {"dtype": torch.float16}),
        # An absent head_dim is what the model makes of it.
        (LLAMA, {}, {"head_dim": 6, "qkv_bias": False, "qk_norm": False}),
        (LLAMA, {"head_dim": None}, {"head_dim": 6}),
        (LLAMA, {"head_dim": 10}, {"head_dim": 10}),
        (LLAMA, {"architectures": ["Qwen2ForCausalLM"]}, {"qkv_bias": True, "qk_norm": False}),
        (
            LLAMA,
            {"architectures": ["Qwen3ForCausalLM"]},
            {"head_dim": 128, "qkv_bias": False, "qk_norm": True},
        ),
        (MOE, {}, {"head_dim": 6, "experts": 8, "experts_per_token": 2, "expert_ffn": 20}),
        (MOE, {"num_experts": None, "num_local_experts": 8}, {"experts": 8}),
        (MOE, {}, {"normalize_expert_weights": False}),
        (MOE, {"norm_topk_prob": True}, {"normalize_expert_weights": True}),
        (LLAMA, {"num_key_value_heads": None}, {"query_groups": 4}),
        # A sliding window that no layer uses.
        (LLAMA, {**NO_LAYER_SLIDES, "use_sliding_window": False, "max_window_layers": 0}, {}),
        (LLAMA, {**NO_LAYER_SLIDES, "sliding_window": None, "max_window_layers": 0}, {}),
        (LLAMA, {**NO_LAYER_SLIDES, "max_window_layers": 2}, {}),
        (LLAMA, {**NO_LAYER_SLIDES, "layer_types": ["full_attention"] * 2}, {}),
    ],
)
def test_fields_are_read_as_old_and_new_releases_write_them(base, changes, wanted):
    arch = of(base, **changes)
    assert {name: getattr(arch, name) for name in wanted} == wanted
    assert wanted or arch == of(base)


OF_EXPERTS = [
    ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ({"num_experts": 0}, "num_experts=0"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ({"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob=True"),
    (NO_LAYER_SLIDES, "sliding_window=8 .none, or max_window_layers 2"),
]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({**MOE, **changes}, said) for changes, said in OF_EXPERTS),
        ({"architectures": ["GemmaForCausalLM"]}, r"architectures=\['GemmaForCausalLM'\]"),
        ({"architectures": None}, "architectures=None"),
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
        (
            {"rope_parameters": UNNAMED, "max_position_embeddings": 4096},
            "original_max_position_embeddings=4096",
        ),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "factor=None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "one rope for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window=8 .none, or max_window_layers 2",
        ),
    ],
)
def test_what_megatron_does_not_compute_is_refused(changes, said):
    with pytest.raises(UnsupportedArchitecture, match=said):
        of(**changes)


#: In the place of a value, in a file as Python writes and reads it: NaN among them.
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 2**31, 10**300, 10**400, -2.5, 24.0, 1e308, float("nan"),
    float("inf"), "", "4", "nn", [], [4], ["LlamaForCausalLM", 3], {}, {"a": 4}, {"a": {"b": []}},
)  # fmt: skip
TOO_MUCH = "9" * 6000, "[" * 200 + "]" * 200, "[" * 100_000 + "]" * 100_000
EACH = {
    "head_dim": 6, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "rope_scaling": LLAMA3, "partial_rotary_factor": 1.0, "tie_word_embeddings": False,
    "initializer_range": 0.02, "attention_dropout": 0.0, "dtype": "bfloat16", "mlp_bias": False,
    "attention_bias": False, "quantization_config": None, "use_sliding_window": False,
    "sliding_window": 8, "max_window_layers": 2, "norm_topk_prob": False, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "layer_types": None, "torch_dtype": "float32",
}  # fmt: skip


def mutants() -> Iterator[tuple[str, Any, str]]:
    """Yield 600 configurations, each with a field, what it is now, and all of them as JSON."""
    draw = random.Random(63)
    for _ in range(600):
        name, slides = draw.choice((*SUPPORTED, MOE["architectures"][0])), draw.random() < 0.3
        config = {**MOE, **EACH, "rope_scaling": dict(LLAMA3), "architectures": [name]}
        config["use_sliding_window"] = slides and name not in MOE["architectures"]
        key = draw.choice([*config, *LLAMA3])
        inside = config["rope_scaling"] if key in LLAMA3 else config
        value = draw.choice([*ODD, *({"json": text} for text in TOO_MUCH), "missing"])
        if value == "missing":
            inside.pop(key)
        else:
            inside[key] = value
        text = json.dumps(config)
        if isinstance(value, dict) and "json" in value:
            text = text.replace(json.dumps(value), value["json"])
        yield key, value, text


def read_or_refusal(folder: Path) -> Architecture | WeightsError:
    try:
        return Architecture.read(folder)
    except (CheckpointDamaged, UnsupportedArchitecture) as error:
        return error


def test_whatever_a_field_is_it_is_refused_by_name_or_makes_an_architecture(tmp_path):
    seen = Counter()
    for key, value, text in mutants():
        (tmp_path / "config.json").write_text(text)
        found = read_or_refusal(tmp_path)
        seen[type(found)] += 1
        assert (type(found) is CheckpointDamaged) == any(each in text for each in TOO_MUCH), text
        if isinstance(found, Architecture):
            sizes = dataclasses.asdict(found)
            for name in ("layers", "hidden", "ffn", "heads", "head_dim", "vocab_size"):
                assert type(sizes[name]) is int, (key, value)
                assert 0 < sizes[name] < 2**31, (key, value)
            assert found.heads % found.query_groups == found.head_dim % 2 == 0
            for name in ("norm_epsilon", "rope_theta", "init_std", "attention_dropout"):
                assert math.isfinite(sizes[name]), (key, value)
            assert (type(found.tied), type(found.normalize_expert_weights)) == (bool, bool)
            assert found.experts >= found.experts_per_token >= 0
            found.megatron_arguments()
            continue
        said = str(found)
        assert str(tmp_path / "config.json") in said
        assert len(said) < 1000
        if type(found) is UnsupportedArchitecture:
            assert key in said, (value, said)
            assert value in (None, "missing") or repr(value)[:40] in said, (key, said)
    assert min(seen.values()) > 50, seen
    assert len(seen) == 3


def test_a_number_that_cannot_be_shown_is_refused():
    with pytest.raises(UnsupportedArchitecture, match="vocab_size=a int that is too long to show"):
        of(vocab_size=10**6000)


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


def test_a_rotary_base_that_the_command_line_does_not_take_is_an_error():
    with pytest.raises(ValueError, match=r"rope_theta is 10000\.5"):
        of(rope_theta=10000.5).megatron_arguments()
