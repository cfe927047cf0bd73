"""config.json of a Hugging Face checkpoint, as any release of transformers wrote it.

What Megatron's GPTModel does not compute exactly is collected here, all of it at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointDamaged, UnsupportedArchitecture, listed

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
#: What Megatron's RotaryEmbedding has in its source for Llama 3's scaling; only the factor is free.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file. Errors: `CheckpointDamaged` naming the file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} does not exist: is this a checkpoint's folder?") from None
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read as JSON ({error}): fetch it again"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{path} holds {type(found).__name__}, not an object")
    return found


def architecture_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of an `Architecture`.

    Errors: `UnsupportedArchitecture` listing all that GPTModel does not compute.
    """
    bad: list[str] = []
    names = config.get("architectures") or []
    name = names[0] if len(names) == 1 else None
    if name not in SUPPORTED:
        bad.append(f"architectures={names!r} (one of {', '.join(SUPPORTED)})")
    bad += [f"{key} is missing" for key in _REQUIRED if not isinstance(config.get(key), int)]
    heads = config.get("num_attention_heads") or 1
    hidden = config.get("hidden_size") or 1
    # An absent head_dim is another one for this model.
    derived = 128 if name == "Qwen3ForCausalLM" and "head_dim" not in config else hidden // heads
    head_dim = config.get("head_dim") or derived
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        bad.append(f"num_attention_heads={heads} and num_key_value_heads={groups} (a multiple)")
    if head_dim % 2:
        bad.append(f"head_dim={head_dim} (rotary embeddings take an even one)")
    theta, factor = _rope(config, bad)
    _check_layers(config, name, bad)
    moe = _experts(config, bad) if name == "Qwen3MoeForCausalLM" else {}
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        bad.append(f"dtype={config.get('dtype', config.get('torch_dtype'))!r}")
    if bad:
        raise UnsupportedArchitecture(
            f"{where} asks for what Megatron's GPTModel does not compute exactly: {listed(bad)}"
        )
    return {
        "name": name,
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "ffn": config["intermediate_size"],
        "heads": heads,
        "query_groups": groups,
        "head_dim": head_dim,
        "vocab_size": config["vocab_size"],
        "max_positions": config.get("max_position_embeddings") or 2048,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_factor": factor,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": name == "Qwen2ForCausalLM",
        "qk_norm": name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        "init_std": config.get("initializer_range", 0.02),
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "dtype": dtype,
        **moe,
    }


def _check_layers(config: Mapping[str, Any], name: Any, bad: list[str]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        bad.append(f"hidden_act={config['hidden_act']!r} (silu)")
    flags = ["mlp_bias"] + (["attention_bias"] if name != "Qwen2ForCausalLM" else [])
    bad += [f"{flag}={config[flag]!r} (false)" for flag in flags if config.get(flag)]
    if config.get("quantization_config"):
        bad.append("quantization_config (weights that are not quantized)")
    layers = config.get("num_hidden_layers") or 0
    types = config.get("layer_types")
    if types is not None:
        others = sorted({str(each) for each in types} - {"full_attention"})
        if others:
            bad.append(f"layer_types has {', '.join(others)} (full_attention)")
    elif config.get("use_sliding_window") and config.get("sliding_window") is not None:
        # Qwen's dense models slide from this layer on, those with experts in all layers.
        first = 0 if name == "Qwen3MoeForCausalLM" else config.get("max_window_layers", 28)
        if first < layers:
            bad.append(f"sliding_window={config['sliding_window']!r} from layer {first} on (none)")


def _rope(config: Mapping[str, Any], bad: list[str]) -> tuple[float, float | None]:
    """Base, and the factor of Llama 3's scaling where there is one."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        bad.append(f"partial_rotary_factor={partial!r} (1)")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        bad.append(f"rope_type={kind!r} (default or llama3)")
        return theta, None
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    for key, value in _LLAMA3.items():
        if rope.get(key) != value:
            bad.append(f"llama3 rope with {key}={rope.get(key)!r} ({value:g})")
    if not isinstance(rope.get("factor"), (int, float)):
        bad.append(f"llama3 rope with factor={rope.get('factor')!r} (a number)")
        return theta, None
    return theta, float(rope["factor"])


def _experts(config: Mapping[str, Any], bad: list[str]) -> dict[str, Any]:
    # transformers 5 writes the second name.
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    chosen = config.get("num_experts_per_tok") or 0
    normalized = bool(config.get("norm_topk_prob", False))
    if not experts or not 0 < chosen <= experts:
        bad.append(f"num_experts={experts} and num_experts_per_tok={chosen}")
    if not isinstance(config.get("moe_intermediate_size"), int):
        bad.append("moe_intermediate_size is missing")
    if config.get("mlp_only_layers"):
        bad.append(f"mlp_only_layers={config['mlp_only_layers']!r} (none)")
    if config.get("decoder_sparse_step", 1) != 1:
        bad.append(f"decoder_sparse_step={config['decoder_sparse_step']!r} (1)")
    if normalized and chosen == 1:
        bad.append("norm_topk_prob=True with num_experts_per_tok=1 (a router without gradient)")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn": config.get("moe_intermediate_size") or 0,
        "normalize_expert_weights": normalized,
    }
