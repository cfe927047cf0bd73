"""A step whose routers take given experts, and what every router took; runs on a rank.

Legend: B rows, T positions, L layers with routers, K experts of a token, E experts, N tokens of a
router on this rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import packs
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from scenario import Bench, cut, forward

from megatron_idempotent.step import gpt_forward

EXPERTS, TOPK, ROWS = 6, 2, 2


def routes(batch: dict[str, Any], layers: int, seed: int) -> torch.Tensor:
    """Two random experts for every token, [B, T, L, K] of uint8."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch["input_ids"].shape, layers, EXPERTS)
    return torch.rand(shape, generator=generator).topk(TOPK, -1).indices.to(torch.uint8)


def places(lengths: list[int]) -> list[int]:
    """This rank's positions among those of sequences with these rooms, one by one."""
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    found, start = [], 0
    for length in lengths:
        piece = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank) if size > 1 else ():
            found += range(start + number * piece, start + (number + 1) * piece)
        found += range(start, start + length) if size == 1 else ()
        start += length
    return found


def expected(piece: dict[str, Any], layer: int, parallel: bool) -> torch.Tensor:
    """The map [N, E] of a microbatch's tokens on this rank's router of a layer, token by token."""
    given = piece["routed_experts"]
    pack = piece.get("pack")
    mine = places([given.shape[1]] if pack is None else list(pack.segments))
    if parallel:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        part = len(mine) // tp
        rank = parallel_state.get_tensor_model_parallel_rank()
        mine = mine[rank * part : (rank + 1) * part]
    found = torch.zeros(len(mine) * len(given), EXPERTS, dtype=torch.bool)
    for row, (place, sequence) in enumerate(itertools.product(mine, range(len(given)))):
        found[row, given[sequence, place, layer].long()] = True
    return found


def taken(options: dict[str, Any], *, packed: bool = False, calls: int = 1) -> Any:
    """Take a step with random routes; compare what each router took with what it was given.

    Each router has to take each microbatch's experts `calls` times: twice if it is recomputed. A
    token of padding has no route. Returns the step's gradients and result.
    """
    overrides = {"moe_aux_loss_coeff": 0.0, **options.get("config_overrides", {})}
    bench = Bench(
        step={"router_replay": "replay", "forward": gpt_forward if packed else forward},
        loss=packs.PackLoss() if packed else None,
        experts=EXPERTS,
        **{**options, "config_overrides": overrides},
    )
    batch = packs.rows(bench.replica) if packed else bench.batch(4)
    batch["routed_experts"] = routes(batch, bench.step.replay.layers, 7 + bench.replica)
    if not packed:
        for row, mask in enumerate(batch["token_mask"]):
            last = int(mask.nonzero()[-1]) if mask.any() else 0
            batch["routed_experts"][row, last:] = 0
    seen: dict[Any, list[torch.Tensor]] = {}
    of_mtp = 0
    for chunk in bench.model.chunks:
        heads = {id(each) for name, each in chunk.named_modules() if ".mtp" in name}
        for module in chunk.modules():
            if isinstance(module, TopKRouter) and id(module) not in heads:
                maps = seen[module] = []
                module.register_forward_hook(lambda _, __, out, maps=maps: maps.append(out[1]))
            of_mtp += isinstance(module, TopKRouter) and id(module) in heads
    pieces: list[dict[str, Any]] = []
    computed = bench.step._backend.forward

    def noting(model: Any, microbatch: dict[str, Any]) -> Any:
        if model is bench.model.chunks[0]:
            pieces.append(microbatch)
        return computed(model, microbatch)

    bench.step._backend.forward = noting
    if packed:
        budget = {"micro_batch_size": None, "max_tokens_per_microbatch": 64}
        result = bench.run([batch], **budget)
    else:
        result = bench.run(list(cut(batch, [2, 2])))
    assert result.updated
    real = [piece for piece in pieces if piece["routed_experts"].any()]
    assert real
    for module, maps in seen.items():
        wanted = Counter()
        layer = module.layer_number - 1
        for piece in real:
            wanted[_bits(expected(piece, layer, module.config.sequence_parallel))] += calls
        found = Counter(
            bits
            for each in maps
            for bits in {_bits(each, like) for like in _marks(real, layer, module, each)}
            if bits in wanted
        )
        assert found == wanted, f"layer {module.layer_number}"
        assert module.router_replay is None
    return bench.gradients(), result, of_mtp


def _marks(real: list[dict[str, Any]], layer: int, module: Any, each: torch.Tensor) -> Any:
    """The maps of microbatches of this map's size, to leave out tokens without a route."""
    for piece in real:
        wanted = expected(piece, layer, module.config.sequence_parallel)
        if wanted.shape == each.shape:
            yield wanted.sum(1) == TOPK


def _bits(map_NE: torch.Tensor, routed_N: torch.Tensor | None = None) -> bytes:
    """A map's bytes; tokens that have one expert, or none of that mark, count as empty."""
    known_N = map_NE.sum(1) == TOPK if routed_N is None else routed_N
    return (map_NE.cpu() & known_N[:, None].cpu()).numpy().tobytes()
