"""Routers take the experts that an engine took, in every layout, and wrong routes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RELEASE, VIRTUAL, on_ranks, tiered
from scenario import Bench

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import ExpertReplay

BEFORE_REPLAY = RELEASE < (0, 16)
replays = pytest.mark.skipif(BEFORE_REPLAY, reason="routers can be given experts from 0.16 on")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def taken(*arguments: Any, **options: Any) -> Any:
    """Runs on a rank: `replayed.taken`."""
    import replayed

    return replayed.taken(*arguments, **options)


#: Name → ranks, options of the model, and how the step runs.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "one rank, recomputed": (1, {"config_overrides": FULL}, {"calls": 2}),
    "one rank, MoE recomputed": (1, {"config_overrides": SELECTIVE}, {"calls": 2}),
    "packs": (1, {"lengths": (32,)}, {"packed": True}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}, {}),
    "tp2 sp, packs": (
        2,
        {"tp": 2, "sequence_parallel": True, "lengths": (32,)},
        {"packed": True},
    ),
    "cp2": (2, {"cp": 2}, {}),
    "cp2, packs": (2, {"cp": 2, "lengths": (32,)}, {"packed": True}),
    "pp2": (2, {"pp": 2}, {}),
    "pp2 vpp2, recomputed": (2, {**VIRTUAL, "config_overrides": FULL}, {"calls": 2}),
    "dp2 ep2": (2, {"ep": 2}, {}),
    "dp2 ep2, packs": (2, {"ep": 2, "lengths": (32,)}, {"packed": True}),
    "tp2 sp ep2 etp1": (2, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}, {}),
    "mtp pp2": (2, {"pp": 2, "config_overrides": {"mtp_num_layers": 1}}, {}),
    "cp2 tp2 sp, packs, recomputed": (
        4,
        {
            "cp": 2,
            "tp": 2,
            "sequence_parallel": True,
            "lengths": (32,),
            "config_overrides": FULL,
        },
        {"packed": True, "calls": 2},
    ),
}
ALWAYS = ("cp2, packs", "pp2 vpp2, recomputed")


@replays
@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_each_router_takes_the_experts_of_its_own_tokens(megatron_ranks, layout):
    ranks, options, how = LAYOUTS[layout]
    found = megatron_ranks(ranks, taken, options, **how)
    if "mtp" in layout:
        assert any(of_mtp for *_, of_mtp in found)


@replays
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["one rank", "pp2"])
def test_recomputed_gradients_are_the_same_bits(megatron_ranks, layout):
    ranks, options, _ = LAYOUTS[layout]
    kept = megatron_ranks(ranks, taken, options)
    for more in (FULL, SELECTIVE):
        again = megatron_ranks(ranks, taken, {**options, "config_overrides": more}, calls=2)
        for (mine, *_), (wanted, *_) in zip(again, kept, strict=True):
            assert mine.equal(wanted)
            assert mine.any()


def _put(routes: Any, place: Any, value: Any) -> Any:
    routes = routes.clone()
    routes[place] = torch.tensor(value, dtype=routes.dtype)
    return routes


#: What an error says → the fault in right routes.
FAULTS: dict[str, Callable[[Any], Any]] = {
    r"microbatch 0 has no 'routed_experts': give \(2, 32, 4, 2\) integers": lambda _: None,
    r"'routed_experts' of torch.float32: give \(2, 32, 4, 2\) int": lambda routes: routes.float(),
    r"shape \(2, 32, 3, 2\): give \(2, 32, 4, 2\)": lambda routes: routes[:, :, :3],
    r"shape \(2, 31, 4, 2\): give \(2, 32, 4, 2\)": lambda routes: routes[:, :-1],
    r"experts \[1, 6\] .* row 1, position 4, layer 2: give 2 different .* model's 6": (
        lambda routes: _put(routes, (1, 4, 2), [1, 6])
    ),
    r"microbatch 1 has routes of 5 tokens in row 1, layer 1, and 31 that need one": (
        lambda routes: _put(routes, (3, slice(5, None), 1), 0)
    ),
}


@replays
@on_ranks(2)
def test_wrong_routes_are_refused_on_all_ranks_and_named() -> None:
    """A batch that is wrong on rank 1, then the right one."""
    import replayed

    bench = Bench(step={"router_replay": "replay"}, experts=replayed.EXPERTS, pp=2)
    batch = bench.batch(2, full=True)
    right = replayed.routes(batch, bench.step.replay.layers, 3)
    step_id = bench.begin()
    for said, fault in FAULTS.items():
        given = right if bench.rank == 0 else fault(right)
        named = {} if given is None else {"routed_experts": given}
        with pytest.raises((ValueError, RuntimeError), match=said):
            bench.step.microbatch(step_id, {**batch, **named})
    bench.step.microbatch(step_id, {**batch, "routed_experts": right})
    assert bench.step.finish(step_id).updated


@replays
@on_ranks(1)
def test_routers_are_left_as_they_were_and_take_nothing_afterwards() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    model = tiny.build(experts=4, with_optimizer=False, config_overrides=FULL, wire=False)
    chunk = model.chunks[0]
    replay = ExpertReplay(model.chunks)
    tokens_BT = torch.arange(64, device="cuda").view(2, 32)
    positions_BT = torch.arange(32, device="cuda").expand(2, -1)
    hidden = torch.ones(1, 1, 32, 32, device="cuda").tril() < 0.5
    routers = [each for each in chunk.modules() if isinstance(each, TopKRouter)]
    maps: list[torch.Tensor] = []
    for each in routers:
        each.register_forward_hook(lambda _, __, output: maps.append(output[1]))

    def forward() -> torch.Tensor:
        output: torch.Tensor = chunk(tokens_BT, positions_BT, hidden)
        return output

    plain = forward()
    own = list(maps)
    own_BTLK = torch.stack([each.nonzero()[:, 1].view(32, 2, 2) for each in own], 2).transpose(0, 1)
    other_BTLK = (own_BTLK + 1) % 4
    # The same experts give the same bits, and others are counted.
    assert torch.equal(replay.run(chunk, own_BTLK.to(torch.uint8), forward), plain)
    assert replay.take_counts().tolist() == [0, 64 * len(routers)]
    replayed = replay.run(chunk, other_BTLK.flip(-1).to(torch.int16), forward)
    assert not torch.equal(replayed, plain)
    other, whole = replay.take_counts().tolist()
    assert 0 < other <= whole == 64 * len(routers)
    # A forward without routes between a forward and its backward takes none, nor does a later one.
    assert torch.equal(forward(), plain)
    maps.clear()
    replayed.sum().backward()
    for each, layer in zip(maps, reversed(range(len(routers))), strict=True):
        assert torch.equal(each.nonzero()[:, 1], _sorted(other_BTLK[:, :, layer]))
    maps.clear()
    forward().sum().backward()
    recomputed = maps[len(routers) :]
    for each, mine in zip(recomputed, reversed(own), strict=True):
        assert torch.equal(each, mine)
    assert replay.take_counts().tolist() == [0, 0]

    def broken() -> torch.Tensor:
        raise KeyError("lost")

    with pytest.raises(KeyError):
        replay.run(chunk, own_BTLK, broken)
    with pytest.raises(ValueError, match=r"layer 0 .* routes 64 tokens to 2 .* have 62 tokens"):
        replay.run(chunk, own_BTLK[:, 1:], forward)
    stopped = replay.run(chunk, other_BTLK, forward)

    def stop(_: torch.Tensor) -> None:
        raise KeyError("stopped")

    chunk.module.embedding.word_embeddings.weight.register_hook(stop)
    with pytest.raises(KeyError):
        stopped.sum().backward()
    replay.clear()
    assert all(each.router_replay is None for each in routers)
    assert torch.equal(forward(), plain)
    chunk.module.config.moe_router_fusion = True
    with pytest.raises(ValueError, match="moe_router_fusion=True"):
        ExpertReplay(model.chunks)


def _sorted(experts_BTK: Any) -> Any:
    return experts_BTK.transpose(0, 1).reshape(-1, 2).sort(-1).values.flatten()


@on_ranks(1)
def test_a_model_or_a_megatron_that_cannot_replay_says_so() -> None:
    model = tiny.build(with_optimizer=False, wire=False)
    with pytest.raises(ValueError, match=r"TrainStep\(\) got a model without experts"):
        ExpertReplay(model.chunks, of="TrainStep()")
    model = tiny.build(experts=4, with_optimizer=False, wire=False)
    if BEFORE_REPLAY:
        with pytest.raises(RuntimeError, match=r"router_replay needs megatron-core 0\.16, .*found"):
            ExpertReplay(model.chunks)
    else:
        assert ExpertReplay(model.chunks).layers == 2


@replays
@on_ranks(1)
def test_dense_layers_have_no_place_among_the_routes() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    overrides = {"moe_layer_freq": [0, 1, 0, 1], "num_layers": 4}
    model = tiny.build(experts=4, with_optimizer=False, config_overrides=overrides, wire=False)
    with pytest.raises(ValueError, match=r"layer 1 has a router, .* into \[2, 4\]"):
        ExpertReplay(model.chunks)
    spec = get_gpt_decoder_block_spec(model.config, use_transformer_engine=False)
    module = GPTModel(model.config, spec, tiny.VOCABULARY, tiny.SEQUENCE).cuda()
    replay = ExpertReplay([module])
    assert [place for place, _ in replay._routers[id(module)]] == [0, 1]
    assert [router.layer_number for _, router in replay._routers[id(module)]] == [2, 4]
    assert replay.layers == 2
    tokens_BT = torch.arange(64, device="cuda").view(2, 32)
    hidden = torch.ones(1, 1, 32, 32, device="cuda").tril() < 0.5
    routes = torch.tensor([[0, 1], [2, 3]]).expand(2, 32, 2, 2)
    found = []
    for _, router in replay._routers[id(module)]:
        router.register_forward_hook(lambda _, __, output: found.append(output[1].sum(0).tolist()))
    replay.run(module, routes, lambda: module(tokens_BT, tokens_BT % 32, hidden))
    assert found == [[64, 64, 0, 0], [0, 0, 64, 64]]
