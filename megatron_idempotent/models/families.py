"""The architecture of a checkpoint, and its translation into Megatron's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from .hf_config import architecture_fields, read_json

Name = Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A causal language model by its sizes.

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
    """Inner features of the MLP."""
    heads: int
    query_groups: int
    """Heads of keys and values."""
    head_dim: int
    vocab_size: int
    """Tokens, without padding."""
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_factor: float | None = None
    """The factor of Llama 3's scaling of RoPE; None without."""
    tied: bool
    """True if the output layer shares the embedding's weight."""
    qkv_bias: bool
    qk_norm: bool
    init_std: float
    attention_dropout: float
    dtype: torch.dtype
    """The type that the checkpoint names for its weights."""
    experts: int = 0
    """The number of experts in each layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_expert_weights: bool = True

    @classmethod
    def read(cls, directory: str | Path) -> Architecture:
        """Reads a checkpoint's config.json; takes the fields of transformers 4 and 5.

        Errors: `UnsupportedArchitecture` with a list of all that GPTModel would not compute
            exactly; `CheckpointDamaged` where the file is missing or no JSON.
        """
        path = Path(directory) / "config.json"
        return cls(**architecture_fields(read_json(path), str(path)))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """Reads a configuration such as `transformers`' `config.to_dict()`. Errors: as `read`."""
        return cls(**architecture_fields(config, "the configuration"))

    def padded_vocab_size(self, tensor_parallel: int, *, divisible_by: int = 1) -> int:
        """Rows of the embedding in Megatron: a multiple of `divisible_by` × its ranks."""
        step = divisible_by * tensor_parallel
        return -(-self.vocab_size // step) * step

    def transformer_config(self, **overrides: Any) -> Any:
        """A `TransformerConfig` of this model; what it does not say is Megatron's default.

        Weights are of the checkpoint's type unless `params_dtype` is overridden. Experts are not
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
                # A softmax over the chosen logits is one over all, divided by the chosen's sum.
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
            "attention_softmax_in_fp32": True,
            **moe,
        }

    def megatron_arguments(self) -> list[str]:
        """The same for the command line of a `megatron.training` program.

        Lengths, batch sizes, parallel sizes and the optimizer are the program's own. The tokenizer
        is the NullTokenizer: it is what takes the vocabulary's size.

        Errors: `ValueError` for a rotary base that is no whole number, which the parser refuses.
        """
        if self.rope_theta != int(self.rope_theta):
            raise ValueError(
                f"rope_theta is {self.rope_theta}, and --rotary-base takes whole numbers: build "
                "the model with build_gpt() instead"
            )
        flags = [
            ("--group-query-attention", True),
            ("--swiglu", True),
            ("--disable-bias-linear", True),
            # As models of transformers have it, whose weights are half precision.
            ("--attention-softmax-in-fp32", True),
            ("--add-qkv-bias", self.qkv_bias),
            ("--qk-layernorm", self.qk_norm),
            ("--untie-embeddings-and-output-weights", not self.tied),
            ("--use-rope-scaling", self.rope_factor is not None),
            ("--bf16", self.dtype is torch.bfloat16),
            ("--fp16", self.dtype is torch.float16),
            ("--moe-router-pre-softmax", self.experts and not self.normalize_expert_weights),
        ]
        values: dict[str, Any] = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--ffn-hidden-size": self.ffn,
            "--num-attention-heads": self.heads,
            "--num-query-groups": self.query_groups,
            "--kv-channels": self.head_dim,
            "--normalization": "RMSNorm",
            "--norm-epsilon": self.norm_epsilon,
            "--position-embedding-type": "rope",
            "--rotary-base": int(self.rope_theta),
            "--init-method-std": self.init_std,
            "--attention-dropout": self.attention_dropout,
            "--hidden-dropout": 0.0,
            "--max-position-embeddings": self.max_positions,
            "--tokenizer-type": "NullTokenizer",
            "--vocab-size": self.vocab_size,
            "--make-vocab-size-divisible-by": 1,
        }
        if self.rope_factor is not None:
            values["--rope-scaling-factor"] = self.rope_factor
        if self.experts:
            values |= {
                "--num-experts": self.experts,
                "--moe-router-topk": self.experts_per_token,
                "--moe-ffn-hidden-size": self.expert_ffn,
                "--moe-router-load-balancing-type": "none",
                "--moe-aux-loss-coeff": 0.0,
                "--moe-token-dispatcher-type": "alltoall",
            }
        chosen = [flag for flag, wanted in flags if wanted]
        return [*(f"{name}={value}" for name, value in values.items()), *chosen]
