"""Samples bring the experts that the engine's routers took, however they were interrupted."""

import asyncio
import dataclasses

import numpy
import pytest
import torch
from contract_base import cut, listed
from local_cases import request
from tiny import read_weights

from megatron_idempotent.rl.engines import RoutedExperts
from megatron_idempotent.rl.engines.pool import generate_whole
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.weights import WeightUpdate

FAMILY = "qwen3_moe"


def taken(model, tokens):
    """The experts [T, L, K] of a forward of its own."""
    found = []
    hooks = [
        each.register_forward_hook(lambda _, __, output: found.append(output[-1]))
        for each in model.modules()
        if type(each).__name__.endswith("TopKRouter")
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


async def test_a_sample_brings_the_experts_of_all_its_tokens_but_the_last(make_model):
    from transformers import AutoModelForCausalLM

    folder = make_model(family=FAMILY)
    engine = TransformersEngine(folder, routed_experts=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    asked = [request(n, prompt=(5, 6, 7, 8)[: 1 + n % 4], max_tokens=3 + 5 * n) for n in range(5)]
    running = [asyncio.ensure_future(generate_whole(engine, each)) for each in asked]
    # An abort and an update of the same weights: cache and routes are computed again.
    while (await engine.health()).running < len(asked):
        await asyncio.sleep(0)
    weights = cut(read_weights(folder))
    for version, mode in enumerate(("abort", "keep"), start=1):
        update = WeightUpdate(id=f"u{version}", version=version)
        await engine.stage(update, listed(weights))
        await engine.pause(mode)
        await engine.commit(update.id)
        await engine.resume()
    for each, sample in zip(asked, await asyncio.gather(*running), strict=True):
        routes = sample.routed_experts
        assert routes.dtype == "uint8"
        wanted = taken(plain, (*each.prompt, *sample.tokens))[:-1]
        assert numpy.array_equal(routes.numbers(), wanted.numpy())
    await engine.close()


async def test_tokens_keep_the_experts_that_they_were_drawn_with(make_model):
    """After an update the cache is computed with new weights, by which routes are others."""
    first, second = make_model(family=FAMILY), make_model(family=FAMILY, seed=1)
    engine = TransformersEngine(first, routed_experts=True)
    asked = request(0, prompt=(5, 6, 7), max_tokens=40)
    running = asyncio.ensure_future(engine.generate(asked))
    while not any(slot.tokens for slot in engine._serving._rows):
        await asyncio.sleep(0)
    update = WeightUpdate(id="u", version=1)
    await engine.stage(update, listed(cut(read_weights(second))))
    await engine.pause()
    await engine.commit("u")
    await engine.resume()
    sample = await running
    assert set(sample.versions) == {0, 1}
    old = len(asked.prompt) - 1 + sample.versions.count(0)
    from transformers import AutoModelForCausalLM

    tokens = (*asked.prompt, *sample.tokens)
    numbers = torch.from_numpy(sample.routed_experts.numbers().copy())
    for folder, part in ((first, slice(0, old)), (second, slice(old, len(tokens) - 1))):
        wanted = taken(AutoModelForCausalLM.from_pretrained(folder), tokens)
        assert torch.equal(numbers[part], wanted[part].to(numbers.dtype))
    await engine.close()


def test_a_model_without_routers_is_refused(old):
    with pytest.raises(ValueError, match="qwen3 model has no routers"):
        TransformersEngine(old, routed_experts=True)


def test_bytes_have_the_size_that_they_say():
    routes = RoutedExperts(data=bytes(range(12)), layers=3, topk=2)
    assert routes.tokens == 2
    assert routes.numbers().tolist()[1] == [[6, 7], [8, 9], [10, 11]]
    longer = RoutedExperts(data=bytes([9] * 18), layers=3, topk=2)
    assert routes.then(longer).numbers().tolist()[2] == [[9, 9]] * 3
    assert routes.then(longer).data[:12] == routes.data
    with pytest.raises(ValueError, match=r"3 layers and 2 .* 15 bytes; allowed: a multiple of 6"):
        dataclasses.replace(routes, data=bytes(15))
