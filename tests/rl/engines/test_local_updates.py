"""Updates that are given up, torn or loaded after a sleep, and the memory and types of weights."""

import asyncio
import dataclasses

import pytest
import torch
from contract import merged
from contract_base import buckets, cut, listed, next_update
from local_cases import begun, contract, request, works
from tiny import FAMILIES, read_weights
from training import Training
from transformers import AutoModelForCausalLM

from megatron_idempotent.fp8.blockwise import E4M3, dequantize_blockwise
from megatron_idempotent.fp8.export import Fp8Export
from megatron_idempotent.rl.engines import EngineError
from megatron_idempotent.rl.engines.pool import generate_whole
from megatron_idempotent.rl.engines.transformers_weights import ServedWeights
from megatron_idempotent.rl.sync import SyncSettings, WeightSync
from megatron_idempotent.rl.weights import (
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightUpdate,
)

pytestmark = pytest.mark.full

BOTH = ("weights", "kv_cache")


class Arriving:
    """Buckets of which the first arrives; it tells of that, and of being closed."""

    def __init__(self, weights, *, twice=False):
        self.weights, self.twice = weights, twice
        self.arrived, self.closed = asyncio.Event(), asyncio.Event()

    async def __aiter__(self):
        try:
            async for bucket in buckets(read_weights(self.weights)):
                yield bucket
                self.arrived.set()
                if self.twice:
                    yield bucket
                await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def staged(self, engine):
        """The update, and the call that stages it."""
        update = await next_update(engine)
        staging = asyncio.ensure_future(engine.stage(update, aiter(self)))
        await self.arrived.wait()
        return update, staging


async def test_a_rollback_gives_up_an_update_that_is_being_staged(engine, old, new):
    arriving = Arriving(new)
    update, staging = await arriving.staged(engine)
    await engine.rollback("another")
    assert not staging.done()
    await engine.rollback(update.id)
    with pytest.raises(UpdateRefused, match="rolled back"):
        await staging
    assert arriving.closed.is_set()
    await works(engine, old, 0)
    await works(engine, new, await contract.switch(engine, new))


@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_a_stage_that_ends_early_closes_its_buckets(engine, new, how):
    arriving = Arriving(new, twice=how == "refused")
    _, staging = await arriving.staged(engine)
    if how == "cancelled":
        staging.cancel()
    with pytest.raises((UpdateDamaged, asyncio.CancelledError)):
        await staging
    assert staging.cancelled() == (how == "cancelled")
    assert arriving.closed.is_set()


@pytest.mark.parametrize("how", ["sleep", "close"])
async def test_freed_weights_give_up_what_is_staged_and_what_arrives(engine, new, how):
    first = await contract.update(engine, new)
    _, staging = await Arriving(new).staged(engine)
    await getattr(engine, how)()
    with pytest.raises(UpdateRefused, match="freed"):
        await staging
    if how == "sleep":
        await engine.wake(BOTH)
        with pytest.raises(EngineError, match="staged"):
            await engine.commit(first.id)
        await works(engine, new, await contract.switch(engine, new))


async def test_one_id_for_two_versions_is_refused(engine, old, new):
    update = await contract.update(engine, new)
    await contract.put_in(engine, update)
    other = dataclasses.replace(update, version=update.version + 1)
    with pytest.raises(UpdateRefused, match="another id"):
        await engine.stage(other, buckets(read_weights(old)))
    await works(engine, new, 1)


async def test_what_is_sent_may_change_after_the_stage(engine, new):
    update = await next_update(engine)

    async def freed():
        async for bucket in buckets(read_weights(new)):
            yield bucket
            for tensor in bucket.tensors.values():
                tensor.zero_()

    await engine.stage(update, freed())
    await contract.put_in(engine, update)
    await works(engine, new, 1)


# sleep and wake


def bytes_of(model):
    return sum(tensor.nbytes for tensor in model.parameters())


@pytest.mark.parametrize("paused", [False, True])
async def test_asleep_it_holds_nothing_and_awake_it_serves_what_it_is_given(
    watched, engine, old, new, paused
):
    whole = bytes_of(watched.model)
    waiting = asyncio.ensure_future(generate_whole(engine, request(1, max_tokens=60)))
    calls = await begun(engine, *(request(seed, max_tokens=100) for seed in range(3)))
    if paused:
        await engine.pause("keep")
    await engine.sleep()
    for seed, sample in enumerate(await asyncio.gather(*calls)):
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.tokens) < 100
        contract.check_logprobs(request(seed), sample, old)
    assert bytes_of(watched.model) == 0
    health = await engine.health()
    assert (health.status, health.version) == ("DIRTY", None)
    assert health.running <= 1  # the rest of the one that is sent again
    assert "wake" in health.detail
    await engine.sleep()
    await engine.wake(("weights",))
    # Resuming now would serve nothing at all.
    with pytest.raises(EngineError, match="stage and commit"):
        await engine.resume()
    update = WeightUpdate(id="awake", version=3)
    await engine.stage(update, buckets(read_weights(new)))
    assert await engine.commit(update.id) == 3
    assert (await engine.health()).status == "PAUSED"
    with pytest.raises(EngineError, match="kv_cache"):
        await engine.resume()
    await engine.wake(("kv_cache",))
    assert not waiting.done()
    await engine.resume()
    sample = await waiting
    assert len(sample.tokens) == 60
    assert set(sample.versions) == {0, 3}
    contract.check_logprobs(request(1, max_tokens=60), sample, {0: old, 3: new})
    assert bytes_of(watched.model) == whole


async def test_a_sync_wakes_it_with_the_new_weights(engine, new):
    await engine.sleep()
    sync = WeightSync([engine], settings=SyncSettings(colocated=True))
    report = await sync.update(Training(new), 1)
    assert report.named("committed") == ("e1",), report.describe()
    await works(engine, new, 1)


async def test_the_same_update_is_loaded_again_after_a_sleep(engine, old, new):
    update = await contract.update(engine, new)
    await engine.pause()
    await engine.commit(update.id)
    for above in (0, 1):
        await engine.sleep()
        await engine.wake(BOTH)
        refused = {"late": dataclasses.replace(update, id="late", version=0)}
        refused["no version"] = WeightUpdate(id="based", version=9, base_version=1)
        for named, wrong in refused.items():
            with pytest.raises(UpdateRefused, match=named):
                await engine.stage(wrong, buckets(read_weights(old)))
        with pytest.raises(EngineError, match="staged"):
            await engine.commit(update.id)
        again = dataclasses.replace(update, version=update.version + above)
        await engine.stage(again, buckets(read_weights(new)))
        assert await engine.commit(again.id) == again.version
    await engine.resume()
    await works(engine, new, 2)


async def test_weights_wake_before_the_cache(engine, new):
    await engine.wake(("kv_cache",))  # awake already
    await engine.sleep()
    with pytest.raises(EngineError, match="weights"):
        await engine.wake(("kv_cache",))
    with pytest.raises(ValueError, match="graphs"):
        await engine.wake(("weights", "graphs"))
    with pytest.raises(EngineError, match="asleep"):
        await contract.update(engine, new)
    for tag in ("weights", "weights", "kv_cache"):
        await engine.wake((tag,))
    await works(engine, new, await contract.switch(engine, new))


# commits that fail half-way: everything is back, or nothing is served


class Torn:
    """Lets the exchange of tensors fail at one of them, or from one on."""

    def __init__(self, monkeypatch):
        self.calls, self.fail_from, self.fail_to = 0, 0, 0
        put = ServedWeights._put

        def counted(served, name, tensor):
            self.calls += 1
            if self.fail_from <= self.calls < self.fail_to:
                raise MemoryError(f"no room for {name}")
            put(served, name, tensor)

        monkeypatch.setattr(ServedWeights, "_put", counted)

    async def commit(self, engine, update, first, last=None, *, match="in part"):
        """A commit that fails at tensor `first`, and up to `last` when tensors are put back."""
        self.calls, self.fail_from, self.fail_to = 0, first, last or first + 1
        with pytest.raises(EngineError, match=match):
            await engine.commit(update.id)

    def never(self):
        self.fail_to = 0


@pytest.fixture
def torn(monkeypatch):
    return Torn(monkeypatch)


@pytest.mark.parametrize("place", [1, 11, 25])
@pytest.mark.parametrize("then", ["commit", "rollback"])
async def test_a_commit_that_fails_puts_everything_back(engine, old, new, torn, place, then):
    await contract.switch(engine, new)
    update = await contract.update(engine, old)
    (call,) = await begun(engine, request(1, max_tokens=30))
    await engine.pause()
    await torn.commit(
        engine, update, place, match=r"MemoryError: no room.*previous weights are restored"
    )
    health = await engine.health()
    assert (health.status, health.version) == ("PAUSED", 1)
    if then == "rollback":
        await engine.rollback(update.id)
        with pytest.raises(EngineError, match="nothing staged"):
            await engine.commit(update.id)
    else:
        assert await engine.commit(update.id) == 2
    await engine.resume()
    contract.check_logprobs(request(1, max_tokens=30), await call, {1: new, 2: old})
    await works(engine, *((new, 1) if then == "rollback" else (old, 2)))


@pytest.mark.parametrize("then", ["commit", "rollback"])
async def test_a_second_commit_that_fails_puts_back_what_the_first_had_torn(
    engine, old, new, torn, then
):
    update = await contract.update(engine, new)
    await engine.pause()
    for place in (7, 9):
        await torn.commit(engine, update, place, 1000)
    if then == "commit":
        await torn.commit(engine, update, 20, match="previous weights are restored")
    else:
        torn.never()
        await engine.rollback(update.id)
    await engine.resume()
    await works(engine, old, 0)


async def test_freed_weights_that_were_loaded_in_part_are_not_served(engine, new, torn):
    update = await contract.update(engine, new)
    await engine.pause()
    await torn.commit(engine, update, 7, 1000)
    torn.never()
    await engine.sleep()
    await engine.wake(BOTH)
    await engine.rollback(update.id)  # there is nothing to go back to
    assert (await engine.health()).status == "DIRTY"
    update = WeightUpdate(id="awake", version=1)
    await engine.stage(update, buckets(read_weights(new)))
    for last in (8, 1000):
        await torn.commit(engine, update, 7, last, match="no room")
        assert (await engine.health()).status == "DIRTY"
    torn.never()
    await engine.rollback(update.id)
    with pytest.raises(EngineError, match="freed"):
        await engine.resume()
    await engine.stage(update, buckets(read_weights(new)))
    await contract.put_in(engine, update)
    await works(engine, new, 1)


@pytest.mark.parametrize("then", ["commit", "rollback", "other update"])
async def test_weights_of_two_versions_are_never_served(engine, old, new, torn, then):
    update = await contract.update(engine, new)
    (call,) = await begun(engine, request(1, max_tokens=30))
    await engine.pause()
    await torn.commit(engine, update, 7, 1000)  # putting them back fails too
    health = await engine.health()
    assert (health.status, health.version) == ("DIRTY", None)
    assert update.id in health.detail
    with pytest.raises(EngineError, match=update.id):
        await engine.resume()
    with pytest.raises(EngineError, match="roll back"):
        await engine.rollback(update.id)
    assert (await engine.health()).status == "DIRTY"
    based = WeightUpdate(id="based", version=5, base_version=1)
    with pytest.raises(UpdateRefused, match="no version"):
        await engine.stage(based, buckets(read_weights(new)))
    torn.never()
    if then == "rollback":
        await engine.rollback("another")
        assert (await engine.health()).status == "DIRTY"
        await engine.rollback(update.id)
        expected = (old, 0)
    elif then == "commit":
        expected = (new, await engine.commit(update.id))
        await engine.rollback(update.id)  # too late
    else:
        other = await contract.update(engine, old, above=5)
        expected = (old, await engine.commit(other.id))
    assert (await engine.health()).status == "PAUSED"
    await engine.resume()
    weights = {0: old, expected[1]: expected[0]}
    contract.check_logprobs(request(1, max_tokens=30), await call, weights)
    await works(engine, *expected)


# names, memory and types of tensors


def served(directory):
    """A checkpoint's model, and its weights."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    return model, ServedWeights(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_tensors_of_a_checkpoint_and_all_are_served(make_model, family, tied):
    settings = {"family": family, "tied": tied}
    new = read_weights(make_model(seed=1, **settings))
    model, weights = served(make_model(**settings))
    assert set(weights.expected) == {TensorInfo.of(*each) for each in new.items()}
    assert len(weights.expected) == len(new)
    whole = weights.assemble(new)
    if family != "qwen3_moe":  # A commit moves no bytes: parameters become the staged tensors.
        assert all(tensor is new[name] for name, tensor in whole.items())
    weights.exchange(whole)
    expected, _ = served(make_model(seed=1, **settings))
    assert (model.lm_head.weight is model.base_model.embed_tokens.weight) == tied
    for (name, found), wanted in zip(
        [*model.state_dict().items(), *model.named_buffers()],
        [*expected.state_dict().values(), *expected.buffers()],
        strict=True,
    ):
        assert torch.equal(found, wanted), name


def test_buffers_that_are_saved_are_exchanged_too(make_model):
    model = AutoModelForCausalLM.from_pretrained(make_model())
    model.register_buffer("bias", torch.zeros(3))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    weights = ServedWeights(model)
    names = [info.name for info in weights.expected]
    assert ("bias" in names, "scratch" in names) == (True, False)
    weights.exchange({"bias": torch.ones(3)})
    assert model.bias.tolist() == [1, 1, 1]


async def test_some_experts_may_change_and_the_others_stay(make_model, make_engine, tmp_path):
    old, new = (make_model(family="qwen3_moe", seed=seed) for seed in (0, 1))
    changed = {
        name: tensor
        for name, tensor in read_weights(new).items()
        if "experts.2.up_proj" in name or "layers.1.mlp.experts.0.down_proj" in name
    }
    assert len(changed) == 3
    engine = make_engine(old)
    update = WeightUpdate(id="some", version=1, base_version=0)
    await engine.stage(update, buckets(changed))
    await works(engine, old, 0)
    await contract.put_in(engine, update)
    await works(engine, merged(old, changed, tmp_path), 1)


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


@pytest.mark.parametrize(("family", "nbytes"), [("qwen3", 1), ("qwen3_moe", 1 << 20)])
async def test_matrices_in_fp8_are_served_as_what_they_stand_for(
    make_model, make_engine, tmp_path, family, nbytes
):
    # More than one block in each direction, and blocks that the edge cuts.
    old, new = (make_model(family=family, hidden=96, seed=seed) for seed in (0, 1))
    weights, meant = quantized(new)
    engine = make_engine(old)
    update = await next_update(engine)
    await engine.stage(update, buckets(weights, nbytes=nbytes))
    await contract.put_in(engine, update)
    await works(engine, merged(old, meant, tmp_path), 1)
    await works(engine, new, await contract.switch(engine, new))  # and in full precision again


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize(
    "wrong", ["no scales", "shape", "type", "no codes", "embedding's scales", "damaged"]
)
async def test_fp8_that_does_not_fit_is_refused(make_model, make_engine, wrong, based):
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
    elif wrong == "embedding's scales":
        weights["model.norm.weight_scale_inv"] = torch.ones(1)
    given = cut(weights)
    if wrong == "damaged":
        error = UpdateDamaged
        weights[scales].mul_(2)  # after its checksum was made
    engine = make_engine(old)
    update = dataclasses.replace(await next_update(engine), base_version=0 if based else None)
    with pytest.raises(error, match="scale_inv"):
        await engine.stage(update, listed(given))
    await works(engine, old, 0)
