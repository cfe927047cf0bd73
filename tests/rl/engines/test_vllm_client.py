"""The client of a vLLM server where the server lacks something, hangs, or is not there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
    Request,
    vllm_server,
)
from megatron_idempotent.rl.engines.vllm import Timeouts, VllmEngine, VllmServer, seed_at
from megatron_idempotent.rl.engines.vllm_server import PATHS
from megatron_idempotent.rl.weights import WeightUpdate

pytestmark = pytest.mark.full

GENERATE = "/inference/v1/generate"
ASKED = Request(id="q", prompt=(5, 6), max_tokens=2)
HOT = dataclasses.replace(ASKED, temperature=0.7)
HALF, NONE = [{"logprob": -1.0}], {"logprob": -9999.0}
SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
FOREIGN = [{"version": "x", "start": 0, "end": 2}]
CHOICE: dict[str, Any] = {
    "token_ids": [7, 8],
    "logprobs": {"content": [*HALF, {"logprob": -2.0}]},
    "weight_versions": SPANS,
    "finish_reason": "length",
}
WITHOUT = "Worker failed with error ''Worker' has no attribute 'megatron_idempotent''"


class Server:
    """Answers as vLLM does: a path's answer, or a status and an error's message.

    Of a list, each answer is given once, in order.
    """

    def __init__(self, *, stamps: bool = True) -> None:
        fields = {"weight_versions": {}} if stamps else {}
        self.answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
            "/collective_rpc": (500, WITHOUT),
        }
        paths = {path: {"post": {}} for path in (*PATHS, GENERATE)}
        self.answers["/openapi.json"] = {"paths": paths, "components": {"schemas": fields}}
        self.choice = copy.deepcopy(CHOICE)
        self.likeliest = {1.0: -0.5, 2.0: -0.5}
        self.routing_layers: tuple[int, ...] = ()
        self.hung = asyncio.Event()
        self.hangs = ""
        self.ids: list[str] = []
        self.paths: list[str] = []
        self.aborts: int | None = None
        """Counts requests until a response comes back; None for never."""

    def lacks(self, *paths: str) -> Server:
        for path in paths:
            del self.answers["/openapi.json"]["paths"][path]
        return self

    def refuses(self, path: str, status: int, message: str) -> Server:
        self.answers[path] = (status, message)
        return self

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.paths.append(path)
        if path == self.hangs:
            await self.hung.wait()
        if path == "/abort_requests":
            if self.aborts is None:
                self.refuses(path, 500, "out of luck")
            else:
                self.aborts -= 1
                if self.aborts == 0:
                    self.hung.set()
        body = await request.json() if path == GENERATE else {}
        found = self.answers[path] if path in self.answers else await self.drawn(body)
        if isinstance(found, list):
            found = found.pop(0)
        if isinstance(found, tuple):
            status, message = found
            return web.json_response({"error": {"message": message}}, status=status)
        return web.json_response(found)

    async def drawn(self, body: dict[str, Any]) -> dict[str, Any]:
        """A response of two tokens; of one, to look at; of three, which waits to be aborted."""
        asked = body.get("sampling_params", {"max_tokens": 0})
        if asked["max_tokens"] == 1:
            top = [{"logprob": self.likeliest[asked["temperature"]]}]
            return {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}
        if body:
            self.ids.append(body["request_id"])
        if asked["max_tokens"] == 3:
            await self.hung.wait()
            return {"choices": [{**self.choice, "finish_reason": "abort"}]}
        return {"choices": [self.choice]}


@contextlib.asynccontextmanager
async def connected(server: Server, timeouts: Timeouts | None = None) -> AsyncIterator[VllmEngine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    url, layers = f"http://127.0.0.1:{port}/", server.routing_layers
    engine = VllmEngine(url, name="e", timeouts=timeouts, routing_layers=layers)
    try:
        yield engine
    finally:
        await engine.close()
        server.hung.set()
        await runner.cleanup()


def lacks(path: str) -> Any:
    return lambda: Server().lacks(path)


def refuses(status: int, message: str, health: int = 200) -> Any:
    return lambda: Server().refuses(GENERATE, status, message).refuses("/health", health, "")


def choice(**changed: Any) -> Any:
    def server() -> Server:
        made = Server()
        made.choice |= changed
        return made

    return server


def routes(array: Any) -> Any:
    """A server of which layers 1 and 3 have routers, as in this array of what they selected."""

    def server() -> Server:
        file = io.BytesIO()
        numpy.save(file, array)
        made = Server()
        made.choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        made.routing_layers = (1, 3)
        return made

    return server


def without_routes() -> Server:
    server = Server()
    server.routing_layers = (1, 3)
    return server


def generate(**changed: Any) -> Any:
    return lambda engine: engine.generate(dataclasses.replace(ASKED, **changed))


def pause(mode: Any = "keep") -> Any:
    return lambda engine: engine.pause(mode)


def stage(engine: Any) -> Any:
    return engine.stage(WeightUpdate(id="u", version=1), None)


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (lacks(GENERATE), generate(), EngineUnsupported, "/inference.*--enable-scale-out"),
    (lacks("/pause"), pause(), EngineUnsupported, "/pause.*VLLM_SERVER_DEV_MODE=1"),
    (lambda: Server(stamps=False), generate(), EngineUnsupported, "weight_versions"),
    (Server, lambda engine: engine.commit("u"), EngineUnsupported, "--worker-extension-cls"),
    (refuses(403, "Disabled."), generate(), EngineUnsupported, "Disabled.*--enable-scale-out"),
    (Server, generate(temperature=0.7), EngineUnsupported, "processed_logprobs"),
    (Server, generate(prompt=(5,) * 63), ValueError, "64 positions"),
    (Server, generate(temperature=0.009), ValueError, "temperature=0.009"),
    (Server, stage, ValueError, "engine e has no transport"),
    (Server, pause("later"), ValueError, "'later'.*'keep', 'abort'"),
    (refuses(400, "Token 700 is unknown"), generate(), ValueError, "request 'q'.*700 is unknown"),
    (refuses(500, "out of luck"), generate(), EngineError, "500: out of luck"),
    (refuses(500, "out of luck", health=503), generate(), EngineDead, "500: out of luck; .*503"),
    (refuses(503, "gone"), generate(), EngineDead, "503: gone"),
    (choice(logprobs={"content": HALF}), generate(), EngineError, "2 tokens"),
    (choice(logprobs={"content": [*HALF, NONE]}), generate(), EngineError, "finite"),
    (choice(weight_versions=SPANS[:1]), generate(), EngineError, "versions of 1"),
    (choice(weight_versions=None), generate(), EngineError, "versions of 0"),
    (choice(weight_versions=FOREIGN), generate(), EngineError, "'x', which is no number"),
    (choice(finish_reason="error"), generate(), EngineError, "'error'"),
    (without_routes, generate(), EngineUnsupported, "--enable-return-routed-experts"),
    (routes(numpy.zeros((2, 4, 2), "uint8")), generate(), EngineError, "2 tokens.*needed: 3"),
    (routes(numpy.zeros((3, 3, 2), "uint8")), generate(), EngineError, "3 layers.*up to 3"),
]


@pytest.mark.parametrize(("server", "call", "error", "message"), REFUSED)
async def test_what_a_server_was_not_started_with_or_answers_wrongly_is_named(
    server: Any, call: Any, error: type[Exception], message: str
) -> None:
    async with connected(server()) as engine:
        with pytest.raises(error, match=message) as found:
            await call(engine)
        assert type(found.value) is error


async def test_an_update_that_one_worker_could_not_load_is_not_stamped() -> None:
    staged = {"version": 3, "committed": "t", "holds": {"t": 3, "u": 4}, "staging": ""}
    staged |= {"received": 0, "dirty": "", "half": "", "updating": False}
    loaded = staged | {"dirty": "a commit is under way", "half": "u", "updating": True}
    failed = staged | {"dirty": "a commit failed half-way: out of memory", "half": "u"}
    server = Server()
    answers = [[staged] * 2, [staged] * 2, [loaded, failed]]  # state, settle, and after the load
    server.answers["/collective_rpc"] = [{"results": each} for each in answers]
    server.answers |= {"/is_paused": {"is_paused": True}, "/reset_prefix_cache": {"success": True}}
    async with connected(server) as engine:
        with pytest.raises(EngineError, match=r"engine e: .*out of memory"):
            await engine.commit("u")
    assert server.paths[-2:] == ["/update_weights", "/collective_rpc"]


async def test_a_server_that_lacks_something_is_dead() -> None:
    async with connected(Server().lacks("/pause")) as engine:
        health = await engine.health()
        assert health.status == "DEAD"
        assert "VLLM_SERVER_DEV_MODE=1" in health.detail


async def test_a_response_is_stamped_by_the_server_and_tempered_if_it_is_told_so() -> None:
    server = Server()
    server.likeliest = {1.0: -0.5, 2.0: -0.9}
    async with connected(server) as engine:
        for asked in (ASKED, HOT):
            sample = await engine.generate(asked)
            assert (sample.versions, sample.logprobs) == ((3, 4), (-1.0, -2.0))


async def test_routed_experts_come_as_an_array_of_all_layers() -> None:
    numbers = numpy.arange(3 * 4 * 2, dtype="uint8").reshape(3, 4, 2)
    # The first layer is dense: vLLM has a row for it.
    for array, kind in ((numbers, "uint8"), (numbers.astype("uint16") * 100, "int16")):
        async with connected(routes(array)()) as engine:
            found = (await engine.generate(ASKED)).routed_experts
        assert found is not None
        assert (found.tokens, found.layers, found.topk, found.dtype) == (3, 2, 2, kind)
        assert numpy.array_equal(found.numbers(), array[:, [1, 3]])


async def test_a_server_that_hangs_is_dead_in_its_health_and_late_elsewhere() -> None:
    server = Server()
    timeouts = Timeouts(generate_s=0.3, control_s=0.3, health_s=0.3)
    async with connected(server, timeouts) as engine:
        await engine.generate(ASKED)
        server.hangs = "/is_paused"
        with pytest.raises(EngineTimeout, match=r"/is_paused in 0\.3 s"):
            await engine.pause()
        server.hangs = "/health"
        assert (await engine.health()).detail
        server.hangs = GENERATE
        with pytest.raises(EngineTimeout, match="generate"):
            await engine.generate(ASKED)
        assert (await engine.health()).running == 0


@pytest.mark.parametrize("aborts", [2, None])
async def test_closing_gives_back_what_there_is(aborts: int | None) -> None:
    """vLLM overlooks the abort of a request that is still on its way, and may fail at any."""
    server = Server()
    server.aborts = aborts
    async with connected(server) as engine:
        asked = dataclasses.replace(ASKED, max_tokens=3)
        calls = [asyncio.ensure_future(engine.generate(asked)) for _ in range(2)]
        while len(server.ids) < 2:
            await asyncio.sleep(0)
        assert len(set(server.ids)) == 2
        await engine.close()
        for sample in await asyncio.gather(*calls):
            assert sample.finish_reason == "abort"
            assert sample.tokens == (() if aborts is None else (7, 8))


async def test_nobody_at_the_address_is_a_dead_engine() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        engine = VllmEngine(url)
        assert engine.name == url
        for call in (engine.generate(ASKED), engine.pause(), engine.resume(), engine.commit("u")):
            with pytest.raises(EngineDead, match="does not answer"):
                await call
        health = await engine.health()
        assert (health.status, health.version) == ("DEAD", None)
        await engine.close()


def test_parts_of_a_response_are_drawn_with_different_numbers() -> None:
    seeds = {seed_at(seed, part) for seed in (-1, 0, 1, 2**40) for part in range(20)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_limits_are_seconds_above_0() -> None:
    with pytest.raises(ValueError, match=r"bucket_s=0; allowed: seconds above 0"):
        Timeouts(bucket_s=0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    cause = "(Worker pid=7) ERROR [core.py] NotImplementedError: no such cache"
    module.write_text(
        f"print({cause!r})\nfor each in range(99):\n    print(f'line {{each}}')\n"
        "print('no such model')\nraise SystemExit(3)\n"
    )
    server = VllmServer(
        tmp_path, python=sys.executable, environment={"PYTHONPATH": str(tmp_path)}, deadline_s=60
    )
    with pytest.raises(RuntimeError, match="ended with 3; its log ends") as error:
        server.__enter__()
    told = str(error.value).splitlines()
    assert told[1:] == [cause, *(f"line {each}" for each in range(70, 99)), "no such model"]
    assert server.log() == ""
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


#: As a vLLM does, it takes its time before it listens, and ends if it cannot.
SLOW_SERVER = """
import http.server, json, sys, time
given = dict(zip(sys.argv[1:], sys.argv[2:]))
names = sys.argv[sys.argv.index("--served-model-name") + 1 :][:2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"data": [{"id": name} for name in names]} if "models" in self.path else {}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
time.sleep(1.0)
http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


def served_by(program: str, folder: Path, port: int = 0) -> VllmServer:
    """A server that runs a program in the place of vLLM's."""
    (folder / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (folder / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(program)
    where = {"PYTHONPATH": str(folder)}
    return VllmServer(folder, python=sys.executable, environment=where, port=port, deadline_s=60)


@contextlib.contextmanager
def stranger(port: int, models: Callable[[], list[str]]) -> Iterator[int]:
    """A server that answers at a port, or a free one, as any vLLM with these models would."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": name} for name in models()]}).encode())

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def listens_at(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("told", [True, False], ids=["/proc", "without /proc"])
def test_a_server_is_its_own_and_no_other_that_answers_at_its_address(
    tmp_path: Path, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not told:
        monkeypatch.setattr(vllm_server, "_listens", lambda *_: None)
    late: list[VllmServer] = []
    # Where the system says who listens, not even the name that it was given is believed.
    with stranger(0, lambda: [each._alias for each in late if told]) as port:
        late.append(served_by(SLOW_SERVER, tmp_path / "late", port))
        with pytest.raises(RuntimeError, match=r"ended with 1(?s:.)*already in use"):
            late[0].__enter__()
    with served_by(SLOW_SERVER, tmp_path / "own") as server:
        assert server.running
        port = int(server.url.rpartition(":")[2])
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        deadline = time.monotonic() + 20
        while listens_at(port):  # what the process had started ends a moment after it
            assert time.monotonic() < deadline
        with stranger(port, lambda: [server._alias]):
            assert not server.running


OWNER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_vllm_client import SLOW_SERVER, served_by
from megatron_idempotent.rl.engines.vllm import ServedVllm
from megatron_idempotent.rl.weights.transports import SharedMemorySender
server = served_by(SLOW_SERVER, Path({folder!r}))
engine = ServedVllm(server, name="a", transport=SharedMemorySender)
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("dies", ["owner", "server"])
def test_a_server_and_the_process_that_started_it_end_with_each_other(
    tmp_path: Path, dies: str
) -> None:
    program = OWNER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        server = int(owner.stdout.readline())
        if dies == "owner":
            owner.kill()
        else:
            os.killpg(server, signal.SIGKILL)
            assert owner.wait(20) == 1
            assert "vLLM of engine a ended with -9" in owner.stderr.read()
    deadline = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(server, 0)
            time.sleep(0.05)
        pytest.fail("the server lives on")


def test_what_answers_in_no_protocol_is_no_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def babble() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as connection:
                        connection.recv(100)
                        connection.sendall(b"hello\r\n")

        threading.Thread(target=babble, daemon=True).start()
        port = listening.getsockname()[1]
        server = served_by(SLOW_SERVER, tmp_path, port)
        with pytest.raises(RuntimeError, match="ended with 1; its log"):
            server.__enter__()
