"""A trainer computes the engine's log-probs with its experts, where it did not without them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from ranks import RELEASE

EXPERTS, NEAR = 6, 3
PROMPT, TOKENS, SAMPLES = (5, 3, 7, 11), 24, 6


def nearly_tied(folder: Any) -> None:
    """Write a checkpoint whose routers are torn between experts that differ in all else.

    Of three experts each, rows of the router differ in their last bits: rounding chooses.
    """
    import hf_checkpoints

    generator = torch.Generator().manual_seed(4)
    model = hf_checkpoints.model_of("moe", generator, num_experts=EXPERTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                for expert in range(EXPERTS):
                    last = torch.randint(-2, 3, parameter[0].shape, generator=generator)
                    parameter[expert] = parameter[expert % (EXPERTS // NEAR)]
                    parameter[expert] *= 1 + last * 2.0**-23
    model.save_pretrained(folder)


async def drawn(folder: Any) -> list[Any]:
    from megatron_idempotent.rl.engines import Request
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    engine = TransformersEngine(folder, routed_experts=True)
    asked = [
        Request(id=str(seed), prompt=(*PROMPT, seed), max_tokens=TOKENS, seed=seed)
        for seed in range(SAMPLES)
    ]
    found = await asyncio.gather(*map(engine.generate, asked))
    await engine.close()
    return list(found)


def compared(folder: Any, layout: dict[str, int]) -> None:
    """Runs on a rank: the trainer's log-probs of samples, without and with their experts."""
    import hf_programs
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.rl.trainer.batch import pack_rows
    from megatron_idempotent.step import ExpertReplay

    samples = asyncio.run(drawn(folder))
    # Another engine's routers may be torn the other way.
    torch.distributed.broadcast_object_list(samples)
    hf_programs.parallel(**layout)
    arch, _, chunks = hf_programs.loaded(folder, params_dtype=torch.float32)
    model = chunks[0].eval()
    rows = [((*PROMPT, seed), sample, 0.0) for seed, sample in enumerate(samples)]
    batch = pack_rows(rows, positions=len(PROMPT) + TOKENS, pad_id=0, replays=True)
    hidden = torch.ones(1, 1, *[batch.tokens_BT.shape[1]] * 2).tril() < 0.5
    place_BT = torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT)

    def logits() -> torch.Tensor:
        found: torch.Tensor = model(batch.tokens_BT, place_BT, hidden)
        return found

    response_BT = batch.loss_mask_BT > 0
    replay, measure = ExpertReplay(chunks), ExpertReplay(chunks, mode="measure")
    routes = batch.routed_experts[:, :-1]
    gaps, shares, preferred = [], [], []
    maps: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _, __, output: maps.append(output[1]))
    # Tokens with a route, in the order of routers: positions first.
    routes_NLK = routes.transpose(0, 1).flatten(0, 1).long()
    routed_N = (torch.arange(routes.shape[1])[:, None] < batch.lengths_B - 1).flatten()
    with torch.no_grad():
        for each in (measure, replay):
            maps.clear()
            logits_BTV = each.run(model, routes, logits)
            given = {"targets": batch.targets_BT, "vocab_size": arch.vocab_size}
            logprob_BT = token_logprobs(logits=logits_BTV, **given).logprob
            gap_BT = (logprob_BT - batch.old_logprobs_BT).abs()[response_BT]
            gaps.append(float(gap_BT.max()))
            other, whole = each.take_counts().tolist()
            assert whole == len(maps) * int(routed_N.sum())
            preferred.append(other / whole)
            taken_NLE = torch.stack(maps, 1)
            same_NL = taken_NLE.gather(2, routes_NLK).all(2)[routed_N]
            shares.append(1 - float(same_NL.double().mean()))
    # As `hf_programs.close` has it, for two logits of which a log-prob is a difference.
    bound = 2 * 60 * 5 * 4 * 2.0**-23 * float(logits_BTV.abs().max())
    print("largest gap without and with, bound, share of other experts:", gaps, bound, shares)
    assert gaps[1] <= bound < gaps[0] / 10
    assert shares == [pytest.approx(preferred[0]), 0.0]
    assert min(preferred) > 0.05  # a router's own choice is another one, replayed or not


@pytest.mark.skipif(RELEASE < (0, 16), reason="routers can be given experts from 0.16 on")
@pytest.mark.parametrize("layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.exhaustive)])
def test_replayed_logprobs_are_the_engines(megatron_ranks, tmp_path, layout):
    pytest.importorskip("transformers")
    nearly_tied(tmp_path)
    megatron_ranks(layout.get("tp", 1), compared, tmp_path, layout)
