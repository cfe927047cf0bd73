"""The SGLang engine of examples/ sends what it says, to a server that answers and samples nothing.

It shows nothing of SGLang itself, on which the program was never run.
"""

import asyncio
import inspect
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("aiohttp")
pytest.importorskip("torch")

import torch
from aiohttp import web

from megatron_idempotent.rl.engines import EngineError, Request, RolloutEngine
from megatron_idempotent.rl.weights import Bucket, UpdateRefused, WeightUpdate
from megatron_idempotent.rl.weights.safetensors_io import Checkpoint, write_tensors

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = Request(id="0", prompt=(5, 6), max_tokens=4, stop_tokens=(2,), seed=1)


def answer(tokens, reason, *versions):
    spans = [{"version": str(v), "start": at, "end": at + 1} for at, v in enumerate(versions)]
    scored = [[-0.5, token, None] for token in tokens]
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": scored}
    return {"output_ids": tokens, "meta_info": meta | {"weight_versions": spans}}


@pytest.fixture
def driven(tmp_path, monkeypatch):
    """`driven(scenario, answers)` runs it with an engine; returns the paths and bodies it sent."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from sglang_engine import SglangEngine

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_tensors(checkpoint / "model.safetensors", {"w": torch.zeros(2)}, durable=False)

    def drive(scenario, answers=()):
        sent, left = [], list(answers)

        async def handle(request):
            sent.append((request.path, await request.json() if request.can_read_body else None))
            if request.path == "/generate":
                return web.json_response(left.pop(0))
            failed = request.path == "/update_weights_from_disk" and left and left.pop(0)
            return web.json_response({"success": not failed})

        async def main():
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            engine = SglangEngine(url, checkpoint=checkpoint, directory=tmp_path / "sync")
            try:
                await asyncio.wait_for(scenario(engine), 30)
            finally:
                await engine.close()
                await runner.cleanup()

        asyncio.run(main())
        return sent

    yield drive
    sys.modules.pop("sglang_engine")


async def update(value):
    yield Bucket.of(0, {"w": torch.full((2,), value)})


def test_it_has_what_the_protocol_asks_for(driven):
    from sglang_engine import SglangEngine

    for name, wanted in inspect.getmembers(RolloutEngine, inspect.isfunction):
        if not name.startswith("_"):
            parameters = inspect.signature(getattr(SglangEngine, name)).parameters
            assert list(parameters) == list(inspect.signature(wanted).parameters), name


def test_a_response_that_the_models_own_end_token_stopped_goes_on_with_the_versions(driven):
    async def scenario(engine):
        sample = await engine.generate(ASKED)
        assert (sample.tokens, sample.versions) == ((7, 9, 2), (3, 4, 4))
        assert sample.finish_reason == "stop"

    parts = [answer([7, 9], "stop", 3, 4), answer([2], "stop", 4)]
    first, second = (body for _, body in driven(scenario, parts))
    assert (first["input_ids"], second["input_ids"]) == ([5, 6], [5, 6, 7, 9])
    assert second["sampling_params"]["max_new_tokens"] == 2
    assert first["rid"] != second["rid"]


def test_an_update_is_loaded_in_a_pause_and_a_failed_load_must_not_serve(driven, tmp_path):
    async def scenario(engine):
        await engine.stage(WeightUpdate(id="u", version=1), update(1.0))
        with Checkpoint(tmp_path / "sync" / "v1") as staged:
            assert torch.equal(staged["w"], torch.ones(2))
        with pytest.raises(EngineError, match="is not paused"):
            await engine.commit("u")
        await engine.pause("abort")
        with pytest.raises(EngineError, match="/update_weights_from_disk"):
            await engine.commit("u")
        assert (await engine.health()).status == "DIRTY"
        with pytest.raises(EngineError, match="must not serve"):
            await engine.resume()
        assert await engine.commit("u") == 1
        await engine.resume()
        assert ((await engine.health()).status, (await engine.health()).version) == ("SERVING", 1)
        with pytest.raises(UpdateRefused, match="serves version 1"):
            await engine.stage(WeightUpdate(id="old", version=1), update(2.0))

    sent = [path for path, _ in driven(scenario, [True, False])]
    load = ["/flush_cache", "/update_weights_from_disk"]
    pause = ["/pause_generation", "/pause_generation", "/server_info"]
    asked = ["/server_info"]
    assert sent == [*pause, *load, *asked, *load, "/continue_generation", *asked, *asked]
