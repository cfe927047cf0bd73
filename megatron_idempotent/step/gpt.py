"""Calls a `GPTModel` with rows or with a pack of sequences: `gpt_forward`.

Legend: B rows, T positions of a row or of a pack, n sequences of a pack.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack

from .context_parallel import own_positions
from .pieces import Tables
from .records import ATTENTION_MASK, POSITIONS, TOKENS, Batch


def gpt_forward(model: Any, microbatch: Batch) -> torch.Tensor:
    """Calls a `GPTModel` with `gpt_inputs`, and returns its output.

    That is logits [B, T, V] on the last pipeline stage ([1, T, V] for a pack), hidden states on
    the others.
    """
    output: torch.Tensor = model(**gpt_inputs(model, microbatch))
    return output


def gpt_inputs(model: Any, microbatch: Batch) -> dict[str, Any]:
    """Returns the arguments that a `GPTModel` is called with for a microbatch.

    Rows are `input_ids` [B, T], with `position_ids` (0..T-1 if there are none) and an
    `attention_mask`. A pack is `input_ids` [1, T] or [T] with a `Pack`, Megatron's
    `PackedSeqParams`, or `cu_seqlens` and, where sequences are padded, `cu_seqlens_padded`. Padding
    after a sequence belongs to it in attention, which is causal, so that no token sees it. Routers
    (from 0.16 on) and MTP heads are told where the padding of a `Pack` is, so that their losses
    count tokens alone. Routers with an expert bias or quantile balancing are not told, because
    releases up to 0.19 compute wrongly then.

    Under context parallelism rows and packs come whole, and the model is given this rank's
    `own_positions`; a mask [B, 1, T, T] is cut to the rank's queries.

    Args:
        model: a chunk, in any wrappers.
        microbatch: one microbatch of a step.

    Raises:
        ValueError: a pack of more than one row, or positions that context-parallel ranks cannot
            share.

    Example:
        stats = model_logprobs(model, **gpt_inputs(model, microbatch), targets=targets)
    """
    tokens = microbatch[TOKENS]
    positions = microbatch.get(POSITIONS)
    pack = next((each for each in microbatch.values() if isinstance(each, Pack)), None)
    packed = _packed_seq_params(microbatch, pack)
    if packed is None:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = microbatch.get(ATTENTION_MASK)
        if mask is not None and mask.dim() == 4 and mask.shape[2] == tokens.shape[1]:
            mask = own_positions(mask, dim=2)
        return {
            TOKENS: own_positions(tokens),
            POSITIONS: own_positions(positions),
            ATTENTION_MASK: mask,
        }
    tokens_1T = tokens[None] if tokens.dim() == 1 else tokens
    if tokens_1T.dim() != 2 or len(tokens_1T) != 1:
        raise ValueError(
            f"gpt_forward() got a pack with {TOKENS!r} of {tuple(tokens.shape)}: give it as "
            "[1, positions] or [positions]"
        )
    if positions is None:
        positions = _positions(packed, tokens_1T) if pack is None else pack.position_ids
    found = {TOKENS: tokens_1T, POSITIONS: positions[None] if positions.dim() == 1 else positions}
    if pack is not None and 0 < sum(pack.lengths) < pack.tokens:
        found |= _padding(get_model_config(model), pack)
    borders = packed.cu_seqlens_q_padded
    borders = packed.cu_seqlens_q if borders is None else borders
    parts = {name: own_positions(value, cu_seqlens=borders) for name, value in found.items()}
    return {**parts, ATTENTION_MASK: None, "packed_seq_params": packed}


def tables_of(chunks: Sequence[Any]) -> Tables:
    """Returns the sizes of a `GPTModel`'s vocabulary and of its learned positions, if it has them.

    All stages of a pipeline know them.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GPTModel):
                learned = module.position_embedding_type == "learned_absolute"
                return Tables(module.vocab_size, module.max_sequence_length if learned else None)
    return Tables(None, None)


def _packed_seq_params(microbatch: Batch, pack: Pack | None) -> Any:
    for value in microbatch.values():
        if isinstance(value, PackedSeqParams):
            return value
    if pack is not None:
        borders, longest = pack.cu_seqlens, pack.max_seqlen
    else:
        given = microbatch.get("cu_seqlens_padded")
        given = microbatch.get("cu_seqlens") if given is None else given
        if given is None:
            return None
        borders = given.reshape(-1).to(torch.int32)
        known = microbatch.get("max_seqlen")
        longest = int(borders.diff().amax() if known is None else known)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _positions(packed: Any, tokens_1T: Tensor) -> Tensor:
    """Counts positions [T] from 0 in each sequence, and in the padding after the last one."""
    given = packed.cu_seqlens_q_padded
    given = packed.cu_seqlens_q if given is None else given
    borders: Tensor = given.to(tokens_1T.device, torch.int64)
    place_T = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)
    number_T = torch.searchsorted(borders[1:].contiguous(), place_T, right=True)
    return place_T - borders[number_T]


def _padding(config: Any, pack: Pack) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    routes = getattr(config, "num_moe_experts", None) is not None
    knows = "padding_mask" in inspect.signature(GPTModel.forward).parameters
    balanced = getattr(config, "moe_router_load_balancing_type", None)
    # Upstream combines masks of other shapes for the bias, and quantiles know no padding.
    biased = getattr(config, "moe_router_enable_expert_bias", False)
    if routes and knows and not biased and balanced != "quantile_balancing":
        found["padding_mask"] = ~pack.mask[None]
    if getattr(config, "mtp_num_layers", None):
        found["loss_mask"] = pack.mask[None].float()
    return found
