"""Describes the architecture of a Hugging Face checkpoint in Megatron's terms.

A configuration that Megatron's GPTModel does not compute exactly is rejected, with a list of all
reasons. Errors of checkpoints are also defined here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_idempotent.rl.weights.records import WeightsError, listed
from megatron_idempotent.rl.weights.safetensors_io import read_json
from megatron_idempotent.window.agreement import describe, exchange, refuse_if_poisoned


class UnsupportedArchitecture(WeightsError):
    """Megatron's GPTModel would not compute the model exactly; the message lists all reasons."""


class CheckpointMismatch(WeightsError):
    """Tensors of a checkpoint do not fit the model by name, shape or type; the message lists
    them.
    """


class FailedElsewhere(WeightsError):
    """Another rank failed in an operation of all ranks; the message has the failed rank's number
    and error.
    """


def agree_on(error: BaseException | None, what: str, *, deadline_s: float) -> None:
    """Raise on all ranks if any rank has an error: on a failing rank that rank's own error, on the
    other ranks `FailedElsewhere`. A collective of the default group, if there is one.

    Args:
        error: the error on this rank; None if there is none.
        what: the consequence of the failure, such as "nothing was loaded".
        deadline_s: how long to wait for the slowest rank, in seconds.

    Raises:
        FailedElsewhere: another rank has an error, and this one has none.
        BaseException: `error`.
    """
    refuse_if_poisoned()
    failures = exchange(None if error is None else describe(error), deadline_s)
    if error is not None:
        raise error
    if failures:
        ranks_by_text: dict[str, list[str]] = {}
        for rank, text in sorted(failures.items()):
            ranks_by_text.setdefault(text, []).append(str(rank))
        causes = "; ".join(f"rank {', '.join(ranks)}: {t}" for t, ranks in ranks_by_text.items())
        raise FailedElsewhere(f"{what}: {causes}")


SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
#: Constants in the source of Megatron's RotaryEmbedding for Llama 3's scaling; only the factor is
#: an argument.
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


#: The largest size of a dimension, and so of any count.
_LARGEST = 2**31 - 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


class _Fields:
    """Reads and checks the fields of a config.json, and lists the invalid ones in `bad`; null
    counts as missing.
    """

    def __init__(self, config: Mapping[str, Any], bad: list[str]) -> None:
        self.config, self.bad = config, bad

    def refuse(self, key: str, allowed: str) -> None:
        """Add a field to the list of invalid ones, with its value and the allowed values; nothing
        is raised.
        """
        value = self.config.get(key)
        try:
            text = repr(value)
        except (ValueError, RecursionError):  # repr() fails for huge ints and deeply nested lists
            text = f"a {type(value).__name__} that is too long to show"
        self.bad.append(f"{key}={text[:200]} ({allowed})")

    def size(self, key: str, default: int = 1, *, least: int = 1) -> int:
        """Return an integer field of at least `least`. If the field is missing or invalid, return
        the default; an invalid one is listed in `bad`.
        """
        value = self.config.get(key)
        if type(value) is int and least <= value <= _LARGEST:
            return value
        if value is not None:
            self.refuse(key, f"a whole number from {least} to {_LARGEST}")
        return default

    def number(
        self, key: str, default: float, *, least: float = 0.0, most: float = sys.float_info.max
    ) -> float:
        """Return a number field from `least` to `most`. If the field is missing or invalid, return
        the default; an invalid one is listed in `bad`.
        """
        value: Any = self.config.get(key)
        if type(value) in (int, float) and least <= value <= most:
            return float(value)
        if value is not None:
            self.refuse(key, f"a number from {least:g} to {most:g}")
        return default

    def flag(self, key: str) -> bool:
        """Return a boolean field; False if the field is missing or invalid. An invalid field is
        listed in `bad`.
        """
        value = self.config.get(key)
        if value is not None and type(value) is not bool:
            self.refuse(key, "true or false")
        return value is True


def _check_layers(fields: _Fields, name: Any, layers: int) -> None:
    config = fields.config
    if config.get("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", "silu")
    for flag in ["mlp_bias"] + (["attention_bias"] if name != "Qwen2ForCausalLM" else []):
        if config.get(flag):
            fields.refuse(flag, "false")
    if config.get("quantization_config"):
        fields.refuse("quantization_config", "weights that are not quantized")
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, (list, tuple)):
            fields.refuse("layer_types", "a list")
        elif any(layer_type != "full_attention" for layer_type in types):
            fields.refuse("layer_types", "full_attention alone")
    elif fields.flag("use_sliding_window") and config.get("sliding_window") is not None:
        # In Qwen's dense models layers slide from this one on; in models with experts all do.
        first_sliding = "max_window_layers"
        first = 0 if name == "Qwen3MoeForCausalLM" else fields.size(first_sliding, 28, least=0)
        if first < layers:
            fields.refuse(
                "sliding_window", f"none, or {first_sliding} {layers}, or no use_sliding_window"
            )


def _rope(fields: _Fields) -> tuple[float, float | None]:
    """Return RoPE's base from a config.json, and the factor of Llama 3's scaling (None without this
    scaling). Add fields with values that GPTModel does not support to `fields.bad`.
    """
    config = fields.config
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    if not isinstance(parameters, Mapping) or any(
        isinstance(value, Mapping) for value in parameters.values()
    ):
        fields.refuse(key, "an object, with one rope for all layers")
        parameters = {}
    rope = dict(parameters)
    inner = _Fields(rope, fields.bad)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10_000.0, least=1), least=1)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = inner if "partial_rotary_factor" in rope else fields
    if partial.config.get("partial_rotary_factor") not in (None, 1):
        partial.refuse("partial_rotary_factor", "1")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        rope["rope_type"] = kind
        inner.refuse("rope_type", "default or llama3")
        return theta, None
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    for key, value in _LLAMA3.items():
        if rope.get(key) != value:
            inner.refuse(key, f"{value:g} with llama3")
    if rope.get("factor") is None:
        inner.refuse("factor", "a number with llama3")
    return theta, inner.number("factor", 1.0, least=1)


def _experts(fields: _Fields) -> dict[str, Any]:
    config, bad = fields.config, fields.bad
    # transformers 5 uses the second name.
    experts = fields.size("num_experts", 0, least=0) or fields.size("num_local_experts", 0, least=0)
    experts_per_token = fields.size("num_experts_per_tok", 0, least=0)
    normalized = fields.flag("norm_topk_prob")
    if not 0 < experts_per_token <= experts:
        bad.append(
            f"num_experts={experts} and num_experts_per_tok={experts_per_token} (at most as many)"
        )
    if config.get("moe_intermediate_size") is None:
        bad.append("moe_intermediate_size is missing")
    if config.get("mlp_only_layers"):
        fields.refuse("mlp_only_layers", "none")
    if config.get("decoder_sparse_step", 1) != 1:
        fields.refuse("decoder_sparse_step", "1")
    if normalized and experts_per_token == 1:
        bad.append("norm_topk_prob=True with num_experts_per_tok=1 (a router without gradient)")
    return {
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_ffn": fields.size("moe_intermediate_size"),
        "normalize_expert_weights": normalized,
    }


Name = Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The sizes and options of a causal language model, from its config.json.

    Example:
        arch = Architecture.read("/models/qwen3-8b")
        config = arch.transformer_config(tensor_model_parallel_size=2)
        model = build_gpt(arch, config)
    """

    name: Name
    """The name in config.json's `architectures`."""
    layers: int
    hidden: int
    ffn: int
    """The inner size of the MLP."""
    heads: int
    """The number of query heads."""
    query_groups: int
    """The number of key-value heads."""
    head_dim: int
    vocab_size: int
    """The vocabulary size without padding."""
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_factor: float | None = None
    """The factor of Llama 3's scaling of RoPE; None without such scaling."""
    tied: bool
    """True if the output layer shares the embedding's weight."""
    qkv_bias: bool
    qk_norm: bool
    init_std: float
    attention_dropout: float
    dtype: torch.dtype
    """The dtype that the configuration declares for the weights."""
    experts: int = 0
    """The number of experts in each layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    """The inner size of an expert."""
    normalize_expert_weights: bool = True
    """True if the weights of a token's experts are divided by their sum."""

    @classmethod
    def read(cls, directory: str | Path) -> Architecture:
        """Read a checkpoint's config.json, as transformers 4 or 5 writes it, into an
        `Architecture`.

        Raises:
            UnsupportedArchitecture: GPTModel would not compute the model exactly, or values are
                invalid; the message lists all of them.
            CheckpointDamaged: the file is missing or is not JSON.
        """
        path = Path(directory) / "config.json"
        return cls.of(read_json(path), str(path))

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str = "the configuration") -> Architecture:
        """Make an `Architecture` from a configuration as a dictionary, such as the result of
        transformers' `config.to_dict()`. Raise `UnsupportedArchitecture` for a model that GPTModel
        does not compute exactly.

        Args:
            config: the configuration.
            where: the configuration's name in errors.

        Raises:
            UnsupportedArchitecture: as in `read`.
        """
        bad: list[str] = []
        fields = _Fields(config, bad)
        names = config.get("architectures") or []
        alone = isinstance(names, (list, tuple)) and len(names) == 1
        name: Any = names[0] if alone else None
        if name not in SUPPORTED:
            fields.refuse("architectures", f"one of {', '.join(SUPPORTED)}")
        bad += [f"{key} is missing" for key in _REQUIRED if config.get(key) is None]
        layers, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
        hidden = fields.size("hidden_size")
        # This model has another default for head_dim.
        qwen3 = name == "Qwen3ForCausalLM" and "head_dim" not in config
        head_dim = fields.size("head_dim", 128 if qwen3 else hidden // heads)
        groups = fields.size("num_key_value_heads", heads)
        if heads % groups:
            bad.append(f"num_attention_heads={heads} and num_key_value_heads={groups} (a multiple)")
        if head_dim % 2 or not head_dim:
            bad.append(
                f"head_dim={head_dim} with hidden_size={hidden} and num_attention_heads={heads} "
                "(rotary embeddings take an even one)"
            )
        theta, factor = _rope(fields)
        _check_layers(fields, name, layers)
        moe = _experts(fields) if name == "Qwen3MoeForCausalLM" else {}
        dtype_key = "dtype" if config.get("dtype") else "torch_dtype"
        kind = config.get(dtype_key) or "float32"
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None:
            fields.refuse(dtype_key, f"one of {', '.join(_DTYPES)}")
        sizes = {
            "layers": layers,
            "hidden": hidden,
            "ffn": fields.size("intermediate_size"),
            "heads": heads,
            "query_groups": groups,
            "head_dim": head_dim,
            "vocab_size": fields.size("vocab_size"),
            "max_positions": fields.size("max_position_embeddings", 2048),
            "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope_factor": factor,
            "tied": fields.flag("tie_word_embeddings"),
            "qkv_bias": name == "Qwen2ForCausalLM",
            "qk_norm": name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            "init_std": fields.number("initializer_range", 0.02),
            "attention_dropout": fields.number("attention_dropout", 0.0, most=1.0),
            **moe,
        }
        if bad or dtype is None:
            raise UnsupportedArchitecture(
                f"{where} has what Megatron's GPTModel does not compute exactly: {listed(bad)}"
            )
        return cls(name=name, dtype=dtype, **sizes)

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Return the vocabulary size, padded to a multiple of the number of tensor-parallel ranks.

        Megatron's embedding has that many rows over all ranks.
        """
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def transformer_config(self, **overrides: Any) -> Any:
        """Return Megatron's `TransformerConfig` for this model, with Megatron's defaults for fields
        that the model does not determine.

        Weights have the checkpoint's dtype unless `params_dtype` is overridden. Experts are not
        balanced (`moe_router_load_balancing_type="none"`), as in transformers' forward.

        Args:
            overrides: fields of TransformerConfig: parallel sizes, fusions, recomputation.
        """
        from megatron.core.transformer.transformer_config import TransformerConfig

        dtype = overrides.get("params_dtype", self.dtype)
        values = {
            **self._layers(),
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "fp16": dtype is torch.float16,
            **overrides,
        }
        return TransformerConfig(**values)

    def _layers(self) -> dict[str, Any]:
        moe: dict[str, Any] = {}
        if self.experts:
            moe = {
                "num_moe_experts": self.experts,
                "moe_router_topk": self.experts_per_token,
                "moe_ffn_hidden_size": self.expert_ffn,
                # A softmax over the top-k logits equals one over all, divided by the sum of its top
                # k.
                "moe_router_pre_softmax": not self.normalize_expert_weights,
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_token_dispatcher_type": "alltoall",
            }
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_query_groups": self.query_groups,
            "kv_channels": self.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_epsilon,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "init_method_std": self.init_std,
            "attention_dropout": self.attention_dropout,
            "hidden_dropout": 0.0,
            # As in transformers' models with weights in half precision.
            "attention_softmax_in_fp32": True,
            **moe,
        }

    def megatron_arguments(self) -> list[str]:
        """Return this model's command-line arguments for a `megatron.training` program.

        Lengths, batch sizes, parallel sizes and the optimizer are not included. The tokenizer is
        the NullTokenizer, because that takes the vocabulary's size.

        Raises:
            ValueError: the rotary base is not a whole number, which Megatron's parser rejects.
        """
        if self.rope_theta != int(self.rope_theta):
            raise ValueError(
                f"rope_theta is {self.rope_theta}, and --rotary-base takes whole numbers: build "
                "the model with build_gpt() instead"
            )
        layers = self._layers()
        for field in ("gated_linear_unit", "activation_func", "add_bias_linear"):
            del layers[field]  # set by other flags below
        renamed = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
        options = {
            "group_query_attention": True,
            "swiglu": True,
            "disable_bias_linear": True,
            **{renamed.get(field, field): value for field, value in layers.items()},
            "untie_embeddings_and_output_weights": not self.tied,
            "use_rope_scaling": self.rope_factor is not None,
            "rope_scaling_factor": self.rope_factor,
            "bf16": self.dtype is torch.bfloat16,
            "fp16": self.dtype is torch.float16,
            "position_embedding_type": "rope",
            "rotary_base": int(self.rope_theta),
            "max_position_embeddings": self.max_positions,
            "tokenizer_type": "NullTokenizer",
            "vocab_size": self.vocab_size,
            "make_vocab_size_divisible_by": 1,
        }
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in options.items()
            if value is not None and value is not False
        ]
