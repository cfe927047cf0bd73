"""Tiny checkpoints of transformers' models with random weights, and what those models compute.

Sizes are odd on purpose: heads are wider than hidden / heads, groups fewer than heads, and the
vocabulary divides by nothing. Legend: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

B, T, V = 2, 16, 51
_SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,  # no default of anybody
    "attn_implementation": "sdpa",
    "experts_implementation": "eager",  # the others take no float64
}
_EXPERTS = {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
#: Name → model type, and what its configuration has besides the sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 10, "rope_parameters": _ROPE}),
    "llama3-tied": (
        "llama",
        {
            "rope_parameters": LLAMA3,
            "max_position_embeddings": 1 << 14,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("qwen2", {"rope_parameters": _ROPE}),
    "qwen2-tied": ("qwen2", {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 10, "rope_parameters": _ROPE}),
    "qwen3-tied": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {"head_dim": 10, "norm_topk_prob": True, **_EXPERTS}),
    "moe-tied": (
        "qwen3_moe",
        {"head_dim": 10, "norm_topk_prob": False, "tie_word_embeddings": True, **_EXPERTS},
    ),
}
HALF = ("qwen2-tied", "moe")
"""Checkpoints that there are in bfloat16 too, under their name and "-half"."""


def tokens_BT() -> torch.Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))


def model_of(name: str, generator: torch.Generator, **settings: Any) -> Any:
    """Return a model of `CASES`, with random weights and these changes to its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, more = CASES[name]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**_SIZES, **more, **settings}, dtype=torch.float32)
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in parameter_name:
                parameter.add_(1.0)  # biases and norms start as zeros and ones, which hide mix-ups
    return model


def make(folder: Any, name: str) -> None:
    """Write a checkpoint, its logits, and in float64 those of the same without float32 inside."""
    model = model_of(name, torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)
    torch.save(logits_of(model), folder / "logits.bin")
    if name in HALF:
        half = copy.deepcopy(model).to(torch.bfloat16)
        half.save_pretrained(folder.with_name(f"{name}-half"))
    torch.save(logits_of(in_float64(model)), folder / "logits64.bin")


def logits_of(model: Any) -> torch.Tensor:
    """[B, T, V]"""
    with torch.no_grad():
        found: torch.Tensor = model(tokens_BT()).logits
    return found


def in_float64(model: Any) -> Any:
    """The model with torch's norms, as transformers' own compute in float32 whatever they get."""
    model = model.to(torch.float64)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(child.weight), child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model
