"""Requests through an SGLang server: the fake one, with a real model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from sglang_cases import ROUNDED, request, scenario, stage, true_logprobs, weights
from sglang_server import FakeSglang
from tiny import END, make_checkpoint

from megatron_idempotent.rl.engines import EngineError, EngineTimeout, EngineUnsupported, Sample
from megatron_idempotent.rl.engines.sglang import SglangEngine, facts
from megatron_idempotent.rl.engines.sglang.api import Api
from megatron_idempotent.rl.engines.sglang.requests import read_part


def test_logprobs_are_of_the_distribution_that_is_drawn_from(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> Sample:
        return await engine.generate(request(temperature=0.6))

    sample = scenario(run, tmp_path)
    expected = true_logprobs(0, (5, 6, 7), sample.tokens, temperature=0.6)
    assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)
    assert len(sample.tokens) == 20
    assert sample.finish_reason == "length"
    assert set(sample.versions) == {0}


def test_tokens_across_a_commit_are_stamped_and_behind_it_the_cache_is_new(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> list[Sample]:
        server.hold(7)
        running = [asyncio.ensure_future(engine.generate(request(str(i), seed=i))) for i in (1, 2)]
        await server.held()
        update = await stage(engine, 1)
        await engine.pause()
        assert (await engine.health()).status == "PAUSED"
        assert await engine.commit(update.id) == 1
        server.release()
        # Its prefix is that of the others, and its cache must not be theirs of version 0.
        later = asyncio.ensure_future(engine.generate(request("later")))
        await engine.resume()
        return [*await asyncio.gather(*running), await later]

    *running, later = scenario(run, tmp_path)
    for sample in running:
        assert sample.versions == (0,) * 7 + (1,) * 13
        old = true_logprobs(0, (5, 6, 7), sample.tokens)[:7]
        new = true_logprobs(1, (5, 6, 7), sample.tokens)[7:]
        assert sample.logprobs == pytest.approx([*old, *new], abs=ROUNDED)
    assert later.versions == (1,) * 20
    assert later.logprobs == pytest.approx(true_logprobs(1, (5, 6, 7), later.tokens), abs=ROUNDED)


def test_a_response_goes_on_behind_an_end_token_that_was_not_asked_for(tmp_path: Path) -> None:
    hot = {"max_tokens": 100, "temperature": 50.0, "stop_tokens": (63,)}

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> list[Sample]:
        samples = []
        for seed in range(6):
            before = len(server.said("/generate"))
            sample = await engine.generate(request(seed=seed, **hot))
            samples.append(sample)
            asked = [body["sampling_params"] for body in server.said("/generate")[before:]]
            asked = [params for params in asked if params["max_new_tokens"] > 1]
            ends = [place + 1 for place, token in enumerate(sample.tokens[:-1]) if token == END]
            assert [params["max_new_tokens"] for params in asked] == [
                100 - drawn for drawn in (0, *ends)
            ]
        (first, *_) = (each for each in samples if END in each.tokens[:-1])
        place = first.tokens.index(END)
        again = hot | {"max_tokens": place + 1}
        cut = await engine.generate(request(seed=samples.index(first), **again))
        assert (cut.tokens, cut.finish_reason) == (first.tokens[: place + 1], "length")
        return samples

    samples = scenario(run, tmp_path)
    assert any(END in sample.tokens[:-1] for sample in samples)
    for sample in samples:
        expected = true_logprobs(0, (5, 6, 7), sample.tokens, temperature=50.0)
        assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)


def test_a_response_ends_with_a_stop_token_and_without_one_at_its_length(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> tuple[Sample, Sample]:
        free = await engine.generate(request(max_tokens=200, seed=4))
        return free, await engine.generate(
            request(max_tokens=200, seed=4, stop_tokens=(free.tokens[30], END))
        )

    free, stopped = scenario(run, tmp_path)
    first = min(free.tokens.index(free.tokens[30]), (*free.tokens, END).index(END))
    assert (len(free.tokens), free.finish_reason) == (200, "length")
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish_reason == "stop"


def test_the_same_seed_gives_the_same_tokens_and_no_seed_gives_others(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> list[Sample]:
        seeds = (8, 8, 9, None, None)
        return await asyncio.gather(
            *(engine.generate(request(str(i), seed=seed)) for i, seed in enumerate(seeds))
        )

    same, again, other, free, free_too = (each.tokens for each in scenario(run, tmp_path))
    assert same == again
    assert len({same, other, free, free_too}) == 4


def test_a_seed_that_the_server_does_not_keep_is_refused(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        with pytest.raises(EngineUnsupported, match="--enable-deterministic-inference"):
            await engine.generate(request(seed=3))
        assert len((await engine.generate(request(seed=None))).tokens) == 20

    scenario(run, tmp_path, deterministic=False)


def test_a_seed_may_be_given_up_on_purpose(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.generate(request(seed=3))
        assert "sampling_seed" not in server.said("/generate")[-1]["sampling_params"]

    scenario(run, tmp_path, settings={"seeds": False}, deterministic=False)


def test_logprobs_without_the_temperature_are_refused_but_at_temperature_1(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        with pytest.raises(EngineUnsupported, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await engine.generate(request(temperature=0.6))
        await engine.generate(request())

    scenario(run, tmp_path, original_logprobs=True)


def test_a_prompt_that_says_nothing_of_the_temperature_is_no_reason_to_refuse(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    # As a padding token's is in a model with random weights: what follows it is uniform.
    flat = make_checkpoint(tmp_path / "flat", family="llama")
    model = AutoModelForCausalLM.from_pretrained(flat)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    model.save_pretrained(flat)

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.generate(request(prompt=(0,), temperature=0.6))
        if server.flags.original_logprobs:
            with pytest.raises(EngineUnsupported, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                await engine.generate(request(prompt=(5, 0), temperature=0.6))

    for original in (False, True):
        settings = {"checkpoint": flat}
        scenario(run, tmp_path, start=flat, settings=settings, original_logprobs=original)


def test_a_request_that_the_model_can_never_answer_is_refused(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        for wrong in ({"prompt": (5, 64)}, {"prompt": (-1,)}, {"stop_tokens": (64,)}):
            with pytest.raises(ValueError, match="0 to 63"):
                await engine.generate(request(**wrong))
        with pytest.raises(ValueError, match="context length"):
            await engine.generate(request(max_tokens=254))
        await engine.generate(request(max_tokens=253))

    scenario(run, tmp_path)


def test_nothing_is_left_to_the_defaults_of_the_server(tmp_path: Path) -> None:
    """They are changed with --preferred-sampling-params, and log-probs leave most of them out."""

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> dict[str, object]:
        await engine.generate(request())
        # Without tokens to stop at, one call is enough.
        assert server.said("/generate")[-1]["sampling_params"]["ignore_eos"] is True
        await engine.generate(request(stop_tokens=(9, 4)))
        return server.said("/generate")[-1]["sampling_params"]

    assert scenario(run, tmp_path) == {
        "max_new_tokens": 20,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "stop": None,
        "stop_token_ids": [4, 9],
        "ignore_eos": False,
        "n": 1,
        "sampling_seed": 3,
    }


def test_a_server_that_was_left_paused_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_PROBE_TIMEOUT_S", 0.2)

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        other = Api(server.url, name="before")
        await other.done("POST", "/pause_generation", {"mode": "retract"})
        await other.close()
        with pytest.raises(EngineTimeout, match="/continue_generation"):
            await engine.generate(request())

    scenario(run, tmp_path)


def test_a_cancelled_request_ends_in_the_server_and_others_go_on(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(5)
        cancelled = asyncio.ensure_future(engine.generate(request("1", max_tokens=250)))
        other = asyncio.ensure_future(engine.generate(request("10", max_tokens=15)))
        await server.held()
        cancelled.cancel()
        assert await asyncio.wait([cancelled], timeout=30) == ({cancelled}, set())
        while not server.said("/abort_request"):
            await asyncio.sleep(0.01)
        while len(server.do(lambda: server.scheduler.running)) > 1:
            await asyncio.sleep(0.01)
        server.release()
        sample = await other
        assert (len(sample.tokens), sample.finish_reason) == (15, "length")
        assert (await engine.health()).running == 0

    scenario(run, tmp_path)


def test_an_endpoint_that_is_missing_is_named_before_anything_is_asked_of_it(
    tmp_path: Path,
) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        with pytest.raises(EngineUnsupported, match="lacks /pause_generation"):
            await engine.generate(request())
        assert not server.said("/generate")

    scenario(run, tmp_path, missing=("/pause_generation",))


def test_without_a_list_of_endpoints_the_call_names_the_one_that_is_missing(
    tmp_path: Path,
) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.generate(request())
        with pytest.raises(EngineUnsupported, match="no endpoint /pause_generation"):
            await engine.pause()

    scenario(run, tmp_path, missing=("/pause_generation",), openapi=False)


def test_a_server_that_keeps_no_record_of_versions_does_not_keep_requests(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        with pytest.raises(EngineUnsupported, match='mode="abort" or "wait"'):
            await engine.pause("keep")
        assert (await engine.health()).status == "SERVING"
        update = await stage(engine, 1)
        await engine.pause("wait")
        await engine.commit(update.id)
        await engine.resume()
        assert (await engine.generate(request())).versions == (1,) * 20

    scenario(run, tmp_path, spans=False, flushes_waiting=False)


def test_a_key_is_sent_and_its_lack_is_named(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        await engine.generate(request())

    scenario(run, tmp_path, settings={"api_key": "k"}, api_key="k")
    with pytest.raises(EngineUnsupported, match="give api_key="):
        scenario(run, tmp_path, api_key="k")


def test_aiohttp_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ModuleNotFoundError, match=r"megatron-idempotent\[http\]"):
        SglangEngine("http://127.0.0.1:1", checkpoint=tmp_path, directory=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_token_logprobs": [[-0.1, 8, None]]}, "2 tokens and the 1 that have log-probs"),
        (
            {"output_token_logprobs": [[-0.1, 8, None], [-0.1, 7, None]]},
            "2 that have log-probs are not the same",
        ),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "tokens have versions"),
        (
            {"weight_versions": [{"version": "3", "start": 1, "end": 3}]},
            "tokens have versions .*'start': 1",
        ),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "another client"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "not finite"),
        ({"finish_reason": None}, "ended with None"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(
    change: dict[str, object], message: str
) -> None:
    meta: dict[str, object] = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.1, 8, None], [-0.2, 9, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    good = read_part({"output_ids": [8, 9], "meta_info": meta}, engine="sgl")
    assert (good.versions, good.logprobs, good.finish_reason) == ((3, 3), (-0.1, -0.2), "stop")
    with pytest.raises(EngineError, match=message):
        read_part({"output_ids": [8, 9], "meta_info": meta | change}, engine="sgl")


def test_a_request_that_came_in_a_pause_is_of_the_weights_behind_it(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> Sample:
        update = await stage(engine, 1)
        await engine.pause("abort")
        waiting = asyncio.ensure_future(engine.generate(request()))
        while len(server.said("/generate")) < 2:
            await asyncio.sleep(0.01)
        await engine.commit(update.id)
        await engine.resume()
        return await waiting

    for spans in (True, False):
        sample = scenario(run, tmp_path, spans=spans)
        assert sample.versions == (1,) * 20
        expected = true_logprobs(1, (5, 6, 7), sample.tokens)
        assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)


def test_many_requests_do_not_keep_others_out(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(1)
        calls = [asyncio.ensure_future(engine.generate(request(str(i)))) for i in range(110)]
        while len(server.said("/generate")) < 111:
            await asyncio.sleep(0.01)
        assert (await engine.health()).running == 110
        await engine.pause("abort")
        await asyncio.gather(*calls)
        # SGLang closes idle connections, and one that is used again then looks like its death.
        assert len(set(server.peers)) == len(server.peers)

    scenario(run, tmp_path)


def test_the_fake_server_serves_stale_caches_to_those_who_do_not_flush(tmp_path: Path) -> None:
    """Or the tests of caches above would pass whatever the engine does."""

    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> Sample:
        await engine.generate(request())
        await stage(engine, 1)
        engine._connected.updates._api.call = skip_flush(engine._connected.updates._api)  # type: ignore[method-assign, union-attr]
        await engine.pause()
        await engine.commit("run/1")
        await engine.resume()
        return await engine.generate(request())

    sample = scenario(run, tmp_path)
    expected = true_logprobs(1, (5, 6, 7), sample.tokens)
    assert max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True)) > 0.01
    assert weights(1)


def skip_flush(api: object) -> object:
    call = api.call  # type: ignore[attr-defined]

    async def skipping(method: str, path: str, *args: object, **named: object) -> object:
        path = "/server_info" if path == "/flush_cache" else path
        return await call("GET" if path == "/server_info" else method, path, *args, **named)

    return skipping
