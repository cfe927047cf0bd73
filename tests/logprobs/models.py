"""Models whose log-probs are computed out of logits and out of hidden states. Runs on a rank.

Legend: B batch, S positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import megatron_idempotent
from megatron_idempotent import logprobs, token_logprobs
from megatron_idempotent.proof.cpu import tiny

REAL = tiny.VOCABULARY - 5
"""Tokens in the vocabulary, of which the other columns are padding."""


def build(**options: Any) -> Any:
    """A tiny model in float64, in which only the order of sums tells the two ways apart."""
    megatron_idempotent.apply(strict=True)
    torch.set_default_dtype(torch.float64)  # of norms and positions
    double = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    return tiny.build(
        with_optimizer=options.pop("with_optimizer", False),
        overlap_grad_reduce=False,
        distributed_optimizer=False,
        config_overrides={**double, **options.pop("config_overrides", {})},
        ddp_overrides={"grad_reduce_in_fp32": False},
        **options,
    )


def has_mup() -> bool:
    """Return whether this release scales logits."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return "use_mup" in {field.name for field in dataclasses.fields(TransformerConfig)}


def inputs(tokens_BS: Any) -> dict[str, Any]:
    """Return the arguments that a model is called with, by name."""
    positions = tokens_BS.shape[1]
    return {
        "input_ids": tokens_BS,
        "position_ids": torch.arange(positions).expand_as(tokens_BS),
        "attention_mask": torch.ones(1, 1, positions, positions).tril() < 0.5,
    }


def case(seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Tokens [B, S], and a call with all that there can be one of for each token."""
    torch.manual_seed(seed)
    tokens_BS = torch.randint(0, REAL, (tiny.BATCH, tiny.SEQUENCE))
    targets_BS = tokens_BS.roll(-1, 1)
    targets_BS[:, -1] = -100
    return tokens_BS, {
        "targets": targets_BS,
        "temperature": torch.rand(tokens_BS.shape) + 0.5,
        "entropy": "grad",
        "token_mask": torch.rand(tokens_BS.shape) < 0.6,
        "vocab_size": REAL,
        "workspace_bytes": 4096,
    }


def from_logits(model: Any, tokens_BS: Any, arguments: dict[str, Any], **forward: Any) -> Any:
    """Stats of the logits that the model makes."""
    from megatron.core import parallel_state

    logits_BSV = model(**inputs(tokens_BS), **forward)
    group = parallel_state.get_tensor_model_parallel_group()
    return token_logprobs(logits=logits_BSV, tp_group=group, **arguments)


def from_hidden(model: Any, tokens_BS: Any, arguments: dict[str, Any], **forward: Any) -> Any:
    """Stats of the model's hidden states."""
    return logprobs.model_logprobs(model, **inputs(tokens_BS), **arguments, **forward)


WAYS = (from_hidden, from_logits)


def total(stats: Any) -> Any:
    """A loss in which each token counts differently."""
    torch.manual_seed(17)
    of_logprob, of_entropy = torch.randn(2, *stats.logprob.shape, dtype=torch.float64)
    found = (stats.logprob * of_logprob).sum()
    return found if stats.entropy is None else found + (stats.entropy * of_entropy).sum()


def gradients(model: Any, run: Callable[[], Any]) -> dict[str, Any]:
    """Return what each parameter gets in a run that ends in a loss, in its own memory or DDP's."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    if hasattr(model, "zero_grad_buffer"):
        model.zero_grad_buffer()
    run().backward()
    found = {}
    for name, parameter in parameters.items():
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = gradient.clone()
    return found


def agree(found: Any, wanted: Any) -> None:
    """They differ by what sums in another order may: some thousand roundings, of the whole."""
    assert found.keys() == wanted.keys()
    bound = 5000 * torch.finfo(torch.float64).eps
    for name, value in wanted.items():
        if value is None:
            assert found[name] is None
            continue
        error = (found[name] - value).norm()
        assert error <= bound * value.norm(), (name, error / value.norm())
    assert any(value is not None and value.norm() > 0 for value in wanted.values())


def stage(*, mtp: int = 0, tied: bool = False, **overrides: Any) -> Any:
    """A whole GPTModel in float64 with MTP heads, in no wrapper."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    from megatron_idempotent.megatron.layer_specs import gpt_stage

    more: dict[str, Any] = {}
    if mtp:
        overrides |= {"mtp_num_layers": mtp, "mtp_loss_scaling_factor": 0.1}
    config = build(config_overrides=overrides).config
    if mtp:
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return gpt_stage(
        config,
        vp_stage=None,
        vocab_size=tiny.VOCABULARY,
        max_sequence_length=tiny.SEQUENCE,
        share_embeddings_and_output_weights=tied,
        **more,
    )
