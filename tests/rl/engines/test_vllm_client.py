"""The client of a vLLM server where the server lacks something, hangs, or is not there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
    Request,
)
from megatron_idempotent.rl.engines.vllm import Timeouts, VllmEngine, VllmServer
from megatron_idempotent.rl.engines.vllm.control import _PATHS
from megatron_idempotent.rl.engines.vllm.engine import seed_at, to_sample

ASKED = Request(id="q", prompt=(5, 6), max_tokens=2)
CHOICE = {
    "token_ids": [7, 8],
    "logprobs": {
        "content": [{"logprob": -1.0, "top_logprobs": [{"logprob": -0.5}]}, {"logprob": -2.0}]
    },
    "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1}],
    "finish_reason": "length",
}
CHOICE["weight_versions"][1]["end"] = 2  # type: ignore[index]


class Server:
    """Answers as vLLM does, to what it was started with."""

    def __init__(self, *, without: tuple[str, ...] = (), stamps: bool = True) -> None:
        self.without, self.stamps = without, stamps
        self.likeliest = [-0.5]
        self.hung = asyncio.Event()
        self.hangs = ""
        self.refusal: tuple[int, str] | None = None
        self.ids: list[str] = []
        self.aborts: int | None = None
        """Counts requests until a response comes back; None for never."""

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        if path == self.hangs:
            await self.hung.wait()
        if path == "/openapi.json":
            there = {*_PATHS, "/inference/v1/generate"} - set(self.without)
            paths = {path: {"post": {}} for path in there}
            fields = {"weight_versions": {}} if self.stamps else {}
            return web.json_response({"paths": paths, "components": {"schemas": fields}})
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})
        if path == "/collective_rpc":
            message = "Worker failed with error ''Worker' has no attribute 'megatron_idempotent''"
            return web.json_response({"error": {"message": message}}, status=500)
        if path == "/inference/v1/generate":
            if self.refusal is not None:
                status, message = self.refusal
                return web.json_response({"error": {"message": message}}, status=status)
            body = await request.json()
            asked = body["sampling_params"]
            self.ids.append(body["request_id"] if asked["max_tokens"] > 1 else "")
            if asked["max_tokens"] == 3:
                await self.hung.wait()
                return web.json_response({"choices": [{**CHOICE, "finish_reason": "abort"}]})
            if asked["max_tokens"] == 1:
                at = min(int(asked["temperature"]), len(self.likeliest)) - 1
                top = [{"logprob": self.likeliest[at]}]
                content = [{"logprob": -9.0, "top_logprobs": top}]
                return web.json_response({"choices": [{"logprobs": {"content": content}}]})
            return web.json_response({"choices": [CHOICE]})
        if path == "/abort_requests":
            if self.aborts is None:
                return web.json_response({"error": {"message": "out of luck"}}, status=500)
            self.aborts -= 1
            if self.aborts == 0:
                self.hung.set()
        return web.json_response({})


@contextlib.asynccontextmanager
async def connected(server: Server, timeouts: Timeouts | None = None) -> AsyncIterator[VllmEngine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = VllmEngine(f"http://127.0.0.1:{port}/", name="e", timeouts=timeouts)
    try:
        yield engine
    finally:
        await engine.close()
        server.hung.set()
        await runner.cleanup()


async def test_what_a_server_was_not_started_with_is_named_with_its_remedy() -> None:
    missing = ("/pause", "/inference/v1/generate")
    async with connected(Server(without=missing)) as engine:
        with pytest.raises(EngineUnsupported, match=r"lacks /inference.*--enable-scale-out"):
            await engine.generate(ASKED)
        with pytest.raises(EngineUnsupported, match=r"lacks /pause;.*VLLM_SERVER_DEV_MODE=1"):
            await engine.pause()
        health = await engine.health()
        assert health.status == "DEAD"
        assert "VLLM_SERVER_DEV_MODE=1" in health.detail
    async with connected(Server(stamps=False)) as engine:
        with pytest.raises(EngineUnsupported, match="weight_versions"):
            await engine.generate(ASKED)
    server = Server()
    async with connected(server) as engine:
        with pytest.raises(EngineUnsupported, match="--worker-extension-cls megatron_idem"):
            await engine.commit("u")
        server.refusal = (403, "Scale-out endpoints are disabled.")
        with pytest.raises(EngineUnsupported, match=r"disabled.*--enable-scale-out"):
            await engine.generate(ASKED)
    async with connected(server) as there:
        engine = VllmEngine(there._control.url, model="other")
        with pytest.raises(EngineUnsupported, match="serves m, not other"):
            await engine.generate(ASKED)
        await engine.close()


async def test_logprobs_before_temperature_are_refused_unless_it_is_one() -> None:
    hot = Request(id="hot", prompt=(5, 6), max_tokens=2, temperature=0.7)
    async with connected(Server()) as engine:
        assert (await engine.generate(ASKED)).versions == (3, 4)
        with pytest.raises(EngineUnsupported, match="processed_logprobs"):
            await engine.generate(hot)
    server = Server()
    server.likeliest = [-0.5, -0.9]
    async with connected(server) as engine:
        assert (await engine.generate(hot)).logprobs == (-1.0, -2.0)


async def test_requests_that_vllm_refuses_or_would_change_silently_are_refused() -> None:
    async with connected(Server()) as engine:
        with pytest.raises(ValueError, match="64 positions"):
            await engine.generate(Request(id="long", prompt=(5,) * 60, max_tokens=5))
        with pytest.raises(ValueError, match="temperature"):
            await engine.generate(Request(id="cold", prompt=(5,), max_tokens=2, temperature=0.009))
    server = Server()
    server.refusal = (400, "Token id 700 is out of vocabulary")
    async with connected(server) as engine:
        with pytest.raises(ValueError, match=r"request 'q'.*out of vocabulary"):
            await engine.generate(ASKED)
        server.refusal = (500, "out of luck")
        with pytest.raises(EngineError, match="500: out of luck") as found:
            await engine.generate(ASKED)
        assert not isinstance(found.value, EngineDead)
        server.refusal = (503, "")
        with pytest.raises(EngineDead):
            await engine.generate(ASKED)


async def test_a_server_that_hangs_is_dead_in_its_health_and_late_elsewhere() -> None:
    server = Server()
    timeouts = Timeouts(generate_s=1, control_s=1, health_s=1)
    async with connected(server, timeouts) as engine:
        server.hangs = "/is_paused"
        with pytest.raises(EngineTimeout, match="/is_paused"):
            await engine.pause()
        server.hangs = "/health"
        assert (await engine.health()).detail
        server.hangs = "/inference/v1/generate"
        with pytest.raises(EngineTimeout, match="generate"):
            await engine.generate(ASKED)
        assert (await engine.health()).running == 0


@pytest.mark.parametrize("aborts", [2, None])
async def test_closing_gives_back_what_there_is(aborts: int | None) -> None:
    """vLLM overlooks the abort of a request that is still on its way, and may fail at any."""
    server = Server()
    server.aborts = aborts
    async with connected(server) as engine:
        asked = Request(id="q", prompt=(5, 6), max_tokens=3)
        calls = [asyncio.ensure_future(engine.generate(asked)) for _ in range(2)]
        while len(server.ids) < 2:
            await asyncio.sleep(0)
        assert len(set(server.ids)) == 2
        await engine.close()
        for sample in await asyncio.gather(*calls):
            assert sample.finish_reason == "abort"
            assert sample.tokens == (() if aborts is None else (7, 8))


def test_nobody_at_the_address_is_a_dead_engine() -> None:
    async def scenario(url: str) -> None:
        engine = VllmEngine(url)
        assert engine.name == url
        for call in (engine.generate(ASKED), engine.pause(), engine.resume(), engine.commit("u")):
            with pytest.raises(EngineDead, match="does not answer"):
                await call
        health = await engine.health()
        assert (health.status, health.version) == ("DEAD", None)
        await engine.close()

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        asyncio.run(scenario(f"http://127.0.0.1:{unused.getsockname()[1]}"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"logprobs": [-1.0]}, "2 tokens, and not all of them have a log-prob"),
        ({"logprobs": [-1.0, -9999.0]}, "finite"),
        ({"spans": [{"version": "3", "start": 0, "end": 1}]}, "versions of 1"),
        ({"spans": None}, "versions of 0"),
        ({"finish_reason": "error"}, "'error'"),
    ],
)
def test_a_response_that_is_not_whole_is_an_error(changed: dict[str, object], named: str) -> None:
    whole = {
        "tokens": [7, 8],
        "logprobs": [-1.0, -2.0],
        "spans": [{"version": "3", "start": 0, "end": 2}],
        "finish_reason": "stop",
        "version_of": int,
        "engine": "e",
    }
    assert to_sample(ASKED, **whole).versions == (3, 3)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=named):
        to_sample(ASKED, **{**whole, **changed})  # type: ignore[arg-type]


def test_parts_of_a_response_are_drawn_with_different_numbers() -> None:
    seeds = {seed_at(seed, part) for seed in (-1, 0, 1, 2**40) for part in range(20)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.write_text("print('no such model')\nraise SystemExit(3)\n")
    server = VllmServer(
        tmp_path, python=sys.executable, environment={"PYTHONPATH": str(tmp_path)}, deadline_s=60
    )
    with pytest.raises(RuntimeError, match=r"ended with 3; its log ends:\nno such model"):
        server.__enter__()
    assert server.log() == ""
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid
