"""Weights of the engine: whose memory they are, and under which names and types they come."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from contract_base import ContractBase, buckets, cut, listed, next_update
from contract_updates import merged
from tiny import FAMILIES, read_weights
from transformers import AutoModelForCausalLM

from megatron_idempotent.fp8.blockwise import E4M3, dequantize_blockwise
from megatron_idempotent.fp8.export import Fp8Export
from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.engines.transformers.weights import ServedWeights
from megatron_idempotent.rl.weights import (
    Bucket,
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightUpdate,
)

contract = ContractBase()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def check(engine, weights):
    """It serves those weights."""
    request = Request(id="check", prompt=(5, 6, 7), max_tokens=24, seed=4)
    contract.check_logprobs(request, await engine.generate(request), weights)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_tensors_of_a_checkpoint(make_model, family, tied):
    directory = make_model(family=family, tied=tied)
    served = ServedWeights(AutoModelForCausalLM.from_pretrained(directory))
    saved = {TensorInfo.of(name, tensor) for name, tensor in read_weights(directory).items()}
    assert set(served.expected) == saved
    assert len(served.expected) == len(saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_an_update_is_served(make_model, family):
    new = read_weights(make_model(family=family, tied=True, seed=1))
    model = AutoModelForCausalLM.from_pretrained(make_model(family=family, tied=True))
    served = ServedWeights(model)
    served.exchange(served.assemble(new))
    expected = AutoModelForCausalLM.from_pretrained(make_model(family=family, tied=True, seed=1))
    assert model.lm_head.weight is model.base_model.embed_tokens.weight
    for (name, found), wanted in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(found, wanted), name
    for (name, found), wanted in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, wanted), name


def test_buffers_that_are_saved_are_exchanged_too(make_model):
    model = AutoModelForCausalLM.from_pretrained(make_model())
    model.register_buffer("bias", torch.zeros(3))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    served = ServedWeights(model)
    names = [info.name for info in served.expected]
    assert "bias" in names
    assert "scratch" not in names
    served.exchange({"bias": torch.ones(3)})
    assert model.bias.tolist() == [1, 1, 1]


async def test_what_is_sent_may_change_behind_the_stage(make_model):
    old, new = make_model(), make_model(seed=1)
    engine = TransformersEngine(old)
    tensors = read_weights(new)
    update = await next_update(engine)

    async def freed():
        async for bucket in buckets(tensors):
            yield bucket
            for tensor in bucket.tensors.values():
                tensor.zero_()

    await engine.stage(update, freed())
    await engine.pause()
    await engine.commit(update.id)
    await engine.resume()
    await check(engine, new)
    await engine.close()


def test_a_commit_moves_no_bytes(make_model):
    """Parameters become the staged tensors themselves."""
    served = ServedWeights(AutoModelForCausalLM.from_pretrained(make_model()))
    new = read_weights(make_model(seed=1))
    whole = served.assemble(new)
    pointers = {name: tensor.data_ptr() for name, tensor in new.items()}
    assert {name: tensor.data_ptr() for name, tensor in whole.items()} == pointers


async def test_some_experts_may_change_and_the_others_stay(make_model, tmp_path):
    old, new = (make_model(family="qwen3_moe", seed=seed) for seed in (0, 1))
    changed = {
        name: tensor
        for name, tensor in read_weights(new).items()
        if "experts.2.up_proj" in name or "layers.1.mlp.experts.0.down_proj" in name
    }
    assert len(changed) == 3

    engine = TransformersEngine(old)
    await engine.stage(WeightUpdate(id="some", version=1, base_version=0), buckets(changed))
    await check(engine, old)
    await engine.pause()
    await engine.commit("some")
    await engine.resume()
    await check(engine, merged(old, changed, tmp_path))
    await engine.close()


def quantized(directory):
    """A checkpoint as `Fp8Export` sends it, and what its codes stand for."""
    weights = dict(Fp8Export(dtype=torch.float32).weights(read_weights(directory).items()))
    meant = {
        name: dequantize_blockwise(tensor, weights[name + "_scale_inv"], dtype=torch.float32)
        if tensor.dtype == E4M3
        else tensor
        for name, tensor in weights.items()
        if not name.endswith("_scale_inv")
    }
    assert any(tensor.dtype == E4M3 for tensor in weights.values())
    return weights, meant


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
async def test_matrices_in_fp8_are_served_as_what_they_stand_for(
    make_model, tmp_path, family, nbytes
):
    # More than one block in each direction, and blocks that the edge cuts.
    old, new = (make_model(family=family, hidden=96, seed=seed) for seed in (0, 1))
    weights, meant = quantized(new)

    engine = TransformersEngine(old)
    update = await next_update(engine)
    await engine.stage(update, buckets(weights, nbytes=nbytes))
    await engine.pause()
    await engine.commit(update.id)
    await engine.resume()
    await check(engine, merged(old, meant, tmp_path))
    await contract.switch(engine, new)  # and in full precision again
    await check(engine, new)
    await engine.close()


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("wrong", ["no scales", "shape", "type", "no codes", "embedding's scales"])
async def test_fp8_that_does_not_fit_is_refused(make_model, wrong, based):
    old = make_model(family="qwen3", hidden=96)
    weights, _ = quantized(old)
    name = "model.layers.1.mlp.down_proj.weight"
    scales = name + "_scale_inv"
    error = UpdateMismatch
    if wrong == "no scales":
        del weights[scales]
        error = UpdateDamaged
    elif wrong == "shape":
        weights[scales] = weights[scales].T.contiguous()
    elif wrong == "type":
        weights[scales] = weights[scales].double()
    elif wrong == "no codes":
        weights[name] = read_weights(old)[name]
    else:
        weights["model.norm.weight_scale_inv"] = torch.ones(1)

    engine = TransformersEngine(old)
    update = dataclasses.replace(await next_update(engine), base_version=0 if based else None)
    with pytest.raises(error, match="scale_inv"):
        await engine.stage(update, buckets(weights))
    await check(engine, old)
    await engine.close()


async def test_a_damaged_scale_is_noticed(make_model):
    old = make_model(family="qwen3", hidden=96)
    weights, _ = quantized(old)
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    given = cut(weights)
    for place, bucket in enumerate(given):
        if name in bucket.tensors:
            changed = {**bucket.tensors, name: bucket.tensors[name] * 2}
            given[place] = Bucket(index=place, tensors=changed, checksums=bucket.checksums)

    engine = TransformersEngine(old)
    with pytest.raises(UpdateDamaged, match="scale_inv"):
        await engine.stage(await next_update(engine), listed(given))
    await engine.close()


async def test_one_id_for_two_versions_is_refused(make_model):
    old, new = make_model(), make_model(seed=1)
    engine = TransformersEngine(old)
    update = await contract.update(engine, new)
    await engine.pause()
    await engine.commit(update.id)
    await engine.resume()
    other = dataclasses.replace(update, version=update.version + 1)
    with pytest.raises(UpdateRefused, match="another id"):
        await engine.stage(other, buckets(read_weights(old)))
    await check(engine, new)
    await engine.close()
