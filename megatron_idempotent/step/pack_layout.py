"""Reads where sequences are in a pack, counts them, and gives packs and positions to a model.

A step without packs and context parallelism calls no function of this file.

Legend: B rows, T positions of a row, or all tokens of a pack; n sequences of a pack.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack
from megatron_idempotent.logprobs.targets import context_parallel_part, context_parallel_whole
from megatron_idempotent.megatron.expert_replay import ROUTED_EXPERTS
from megatron_idempotent.patching.needs import absent, is_provided

from .microbatches import (
    ATTENTION_MASK,
    POSITIONS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKENS,
    Batch,
    Spans,
    field_of,
    is_packed,
    pack_in,
)


def spans_in(batch: Any) -> Spans | None:
    """Return (first token, length) of each sequence of a microbatch that holds a pack; None if its
    sequences are rows.

    A pack is a `Pack`, Megatron's `PackedSeqParams`, or a tensor `cu_seqlens`, with
    `cu_seqlens_padded` where sequences are padded. A tensor on a device is read by the host.

    Raises:
        ValueError: the borders do not begin at 0, fall, leave a sequence no room, or do not end
            with the last token.
    """
    pack = pack_in(batch)
    if isinstance(pack, Pack):
        tokens = field_of(batch, TOKENS)
        if isinstance(tokens, Tensor) and tokens.numel() != pack.tokens:
            raise ValueError(
                f"whose Pack has {pack.tokens} tokens, and whose {TOKENS!r} has "
                f"{tokens.numel()}: give one for each token of the Pack, padding included"
            )
        return pack.spans
    if pack is not None:
        borders, padded = pack.cu_seqlens_q, getattr(pack, "cu_seqlens_q_padded", None)
    else:
        borders, padded = field_of(batch, "cu_seqlens"), field_of(batch, "cu_seqlens_padded")
    if borders is None:
        return None
    _, lengths = spans_between("cu_seqlens", borders)
    starts, rooms = spans_between("cu_seqlens_padded", borders if padded is None else padded)
    if len(rooms) != len(lengths):
        raise ValueError(
            f"whose cu_seqlens have {len(lengths)} sequences, and cu_seqlens_padded {len(rooms)}: "
            "give both the same"
        )
    for index, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        if length > room:
            raise ValueError(
                f"whose sequence {index} has {length} tokens and {room} places: let "
                "cu_seqlens_padded leave it as many or more"
            )
    tokens = field_of(batch, TOKENS)
    if isinstance(tokens, Tensor) and not tokens.is_nested and sum(rooms) != tokens.numel():
        raise ValueError(
            f"whose cu_seqlens end at {sum(rooms)}, and which has {tokens.numel()} tokens: let "
            "them end with the last token, padding included"
        )
    return tuple(zip(starts, lengths, strict=True))


def spans_between(name: str, borders: Any) -> tuple[list[int], list[int]]:
    """Return, for the sequences between `borders`, each one's first token and its length."""
    ends = [int(end) for end in torch.as_tensor(borders).reshape(-1).tolist()]
    if not ends or ends[0] != 0:
        raise ValueError(f"whose {name} begin with {ends[:1]}: let them begin with 0")
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        if end < start:
            raise ValueError(
                f"whose {name} fall from {start} to {end} in sequence {index}: give rising ones"
            )
    return ends[:-1], [end - start for start, end in itertools.pairwise(ends)]


def packed_counts(batch: Any, spans: Spans) -> Tensor:
    """Return valid sequences and tokens of a pack, float64 [2], as `valid_counts` does of rows.

    `sample_mask` is [n], one for each sequence; `token_mask` has an entry for each of the pack's
    tokens, and the first of each sequence does not count. Empty sequences do not count.
    """
    sample_mask_n, token_mask_T = field_of(batch, SAMPLE_MASK), field_of(batch, TOKEN_MASK)
    masks = [mask for mask in (sample_mask_n, token_mask_T) if mask is not None]
    device = masks[0].device if masks else torch.device("cpu")
    spans_n2 = torch.tensor(spans, dtype=torch.int64, device=device).view(-1, 2)
    starts_n, lengths_n = spans_n2.unbind(1)
    valid_n = (lengths_n > 0).double()
    if sample_mask_n is not None:
        if sample_mask_n.numel() != len(spans):
            raise ValueError(
                f"whose {SAMPLE_MASK!r} has {sample_mask_n.numel()} entries for {len(spans)} "
                "sequences: give one for each"
            )
        valid_n = valid_n * sample_mask_n.reshape(-1).double()
    if token_mask_T is None:
        tokens_n = (lengths_n - 1).clamp(min=0).double()
    else:
        entries, end = token_mask_T.numel(), max(map(sum, spans), default=0)
        expected = f"whose sequences end at {end}"
        fits, tokens = entries >= end, field_of(batch, TOKENS)
        if isinstance(tokens, Tensor) and not tokens.is_nested:
            expected = f"which has {tokens.numel()} tokens"
            fits = fits and entries == tokens.numel()
        if not fits:
            raise ValueError(
                f"whose {TOKEN_MASK!r} has {entries} entries, and {expected}: give one for each "
                "token, padding included"
            )
        sums_T = torch.nn.functional.pad(token_mask_T.reshape(-1).double(), (1, 0)).cumsum(0)
        second_n = (starts_n + 1).clamp(max=len(sums_T) - 1)
        tokens_n = (sums_T[starts_n + lengths_n] - sums_T[second_n]) * (lengths_n > 0)
    return torch.stack((valid_n, valid_n * tokens_n)).sum(1)


def packed_inputs(model: Any, microbatch: Batch) -> dict[str, Any]:
    """Return the arguments that a `GPTModel` is called with for a pack, see `gpt_inputs`."""
    from megatron.core.utils import get_model_config

    tokens, positions = microbatch[TOKENS], microbatch.get(POSITIONS)
    pack = pack_in(microbatch)
    params = _packed_seq_params(microbatch, pack)
    tokens_1T = tokens[None] if tokens.dim() == 1 else tokens
    if tokens_1T.dim() != 2 or len(tokens_1T) != 1:
        raise ValueError(
            f"gpt_forward() got a pack with {TOKENS!r} of {tuple(tokens.shape)}: give it as "
            "[1, positions] or [positions]"
        )
    if positions is None:
        is_pack = isinstance(pack, Pack)
        positions = pack.position_ids if is_pack else _positions(params, tokens_1T)
    inputs = {TOKENS: tokens_1T, POSITIONS: positions[None] if positions.dim() == 1 else positions}
    if isinstance(pack, Pack) and 0 < sum(pack.lengths) < pack.tokens:
        inputs |= padding_inputs(get_model_config(model), pack.mask[None])
    borders = padded_borders(params)
    parts = {name: own_positions(value, cu_seqlens=borders) for name, value in inputs.items()}
    return {**parts, ATTENTION_MASK: None, "packed_seq_params": params}


def _packed_seq_params(microbatch: Batch, pack: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    longest: Any
    if isinstance(pack, Pack):
        borders, longest = pack.cu_seqlens, pack.max_seqlen
    elif pack is not None:
        return pack
    else:
        padded = microbatch.get("cu_seqlens_padded")
        borders = microbatch["cu_seqlens"] if padded is None else padded
        borders = borders.reshape(-1).to(torch.int32)
        longest = microbatch.get("max_seqlen")
        longest = int(borders.diff().amax() if longest is None else longest)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def padded_borders(packed_seq_params: Any) -> Tensor:
    """Return the `cu_seqlens` of a pack's `PackedSeqParams` with padding, or those without padding
    if the pack has no padded ones.
    """
    padded = packed_seq_params.cu_seqlens_q_padded
    cu_seqlens: Tensor = packed_seq_params.cu_seqlens_q if padded is None else padded
    return cu_seqlens


def own_routes(microbatch: Any) -> Tensor:
    """Return a microbatch's routed experts [B, T / ranks, L, K] at the positions that this
    context-parallel rank computes, as `own_positions` cuts them.
    """
    routes: Tensor = field_of(microbatch, ROUTED_EXPERTS)
    routes = routes[None] if routes.dim() == 3 else routes
    if context_parallel_ranks()[1] == 1:
        return routes
    borders = None
    if is_packed(microbatch):
        borders = padded_borders(_packed_seq_params(microbatch, pack_in(microbatch))).to(
            routes.device
        )
    return own_positions(routes, cu_seqlens=borders)


def _positions(params: Any, tokens_1T: Tensor) -> Tensor:
    """Return each token's position [T], counted from 0 in each sequence of a pack, and in the
    padding after the last sequence.
    """
    borders: Tensor = padded_borders(params).to(tokens_1T.device, torch.int64)
    place_T = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)
    number_T = torch.searchsorted(borders[1:].contiguous(), place_T, right=True)
    return place_T - borders[number_T]


def has_auxiliary_losses(config: Any) -> bool:
    """Tell if a model with this config has MoE routers or MTP heads, whose own losses are means
    over positions.
    """
    routes = getattr(config, "num_moe_experts", None) is not None
    return routes or bool(getattr(config, "mtp_num_layers", None))


def padding_inputs(config: Any, real_BT: Tensor) -> dict[str, Tensor]:
    """Return arguments for a `GPTModel` that tell routers and MTP heads which positions are real;
    none for a model without either.
    """
    from megatron.core.models.gpt import GPTModel

    inputs: dict[str, Tensor] = {}
    balancing = getattr(config, "moe_router_load_balancing_type", None)
    routes = getattr(config, "num_moe_experts", None) is not None
    if routes and balancing != "quantile_balancing":  # quantiles know no padding
        takes_mask = "padding_mask" in inspect.signature(GPTModel.forward).parameters
        if getattr(config, "moe_router_enable_expert_bias", False):
            # Upstream combines masks of other shapes for the bias.
            patch = "expert-bias-knows-padding"
            takes_mask = takes_mask and (is_provided(patch) or not absent(patch, a_door=False))
        if takes_mask:
            inputs["padding_mask"] = ~real_BT
    if getattr(config, "mtp_num_layers", None):
        inputs["loss_mask"] = real_BT.float()
    return inputs


def context_parallel_ranks() -> tuple[int, int]:
    """Return this rank's index in its context-parallel group, and the group's size; (0, 1) if
    Megatron's groups are not initialised.
    """
    from megatron.core import parallel_state  # FSDPTrainStep packs without Megatron

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return (
        int(parallel_state.get_context_parallel_rank()),
        int(parallel_state.get_context_parallel_world_size()),
    )


def own_positions(values: Tensor, *, dim: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Cut whole rows, or a whole pack, down to the positions that this rank computes.

    Without context parallelism these are all. Shift targets before you cut them: the position after
    a part's last one is on another rank.

    Args:
        values: [B, T, …], the same on all context-parallel ranks.
        dim: the dimension of positions.
        cu_seqlens: [n + 1], the borders of a pack's n sequences, padding included; None for rows.

    Returns:
        [B, T / ranks, …]

    Raises:
        ValueError: the positions are no multiple of 2 * ranks.

    Example:
        stats = token_logprobs(logits=output, targets=own_positions(shift_targets(tokens_BT)))
    """
    rank, size = context_parallel_ranks()
    return context_parallel_part(values, rank=rank, size=size, dim=dim, cu_seqlens=cu_seqlens)


def all_positions(part: Tensor, *, dim: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Join the parts of a tensor that `own_positions` cut, one from each context-parallel rank, for
    a loss over whole sequences. A collective.

    All ranks of a context-parallel group take part. In the backward each rank keeps the gradient of
    its own positions, without a collective: all of these ranks compute the same loss of whole
    sequences, and the model's gradients are summed over them.

    Args:
        part: [B, T / ranks, …], this rank's positions.
        dim: the dimension of positions.
        cu_seqlens: as for `own_positions`.

    Returns:
        [B, T, …], the same on all context-parallel ranks.

    Example:
        logprob_BT = all_positions(stats.logprob)  # and the loss says context_parallel = "whole"
    """
    if context_parallel_ranks()[1] == 1:
        return part
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return context_parallel_whole(part, group=group, cu_seqlens=cu_seqlens, dim=dim)
