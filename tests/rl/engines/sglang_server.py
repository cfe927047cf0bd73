"""A small HTTP server that keeps SGLang's rules, and generates with a real transformers model.

SGLang does not start without a GPU. Those of its rules that have to do with the model are listed in
`sglang_scheduler`; these are of its HTTP process, with the files of sglang 0.5.23
(python/sglang/srt/) that they were read in:

entrypoints/http_server.py
- Paths, methods, statuses and bodies of answers: a 400 with {"success": false, "message": …} of
  updates, text of /flush_cache, {"error": {"message": …}} of a request that is refused.
- /openapi.json lists the paths, unless DISABLE_OPENAPI_DOC is set.
- /server_info is answered by the scheduler, in turn; /model_info by the HTTP process.
managers/tokenizer_manager.py
- A request waits at the door while paused, and one that is let in holds the model's lock until it
  has ended. Its prompt and max_new_tokens must fit the model, and its id be of no other.
- pause "abort" aborts everything until nothing holds the lock, asking once a second (here, at
  20 ms); it never pauses the scheduler. The other modes come back before the scheduler has read
  them.
- Loads from disk go through at once while paused, and else wait for the lock. The path and the
  version that /model_info tells are those of the last load that succeeded.
- Two loads at once: the answer to the first goes to the second, and the one to the second ends the
  server (InvalidStateError in the loop that reads answers).
- A client that goes away aborts its request, if it looks by then (here, at 20 ms).
managers/tokenizer_control_mixin.py
- /update_weight_version renames the weights, and changes none.
utils/auth.py
- With a key, requests without it get a 401.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from sglang_scheduler import Flags, Job, Scheduler

_Result = TypeVar("_Result")
_START_S = 60.0


class FakeSglang:
    """A server in a thread of its own; `with FakeSglang(checkpoint) as server: server.url`.

    Its methods are for tests, and called from their threads.
    """

    def __init__(self, checkpoint: Path, **flags: Any) -> None:
        self.flags = Flags(**flags)
        self.died = ""
        self.calls: list[tuple[str, Any]] = []
        self.hangs: set[str] = set()
        self.lies = False  # says that it has loaded, as a router might for another server
        self.peers: list[int] = []
        self._checkpoint = checkpoint
        self._model_path = str(checkpoint)
        self._weight_version = self.flags.weight_version
        self._started: Future[str] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> FakeSglang:
        self._thread.start()
        self.url = self._started.result(_START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill("the test has ended")
        self._thread.join(_START_S)

    def kill(self, reason: str = "killed") -> None:
        """Acts as SIGKILL: all connections end at once, and no answer comes any more."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._die, reason)

    def do(self, action: Callable[[], _Result]) -> _Result:
        """Run something between two steps of the server; returns its result."""

        async def act() -> _Result:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(_START_S)

    def hold(self, tokens: int) -> None:
        """Draw no more than so many tokens of any request, until `release`."""
        self.do(lambda: setattr(self.scheduler, "hold_at", tokens))

    async def held(self) -> None:
        """Wait until requests stand at the hold."""
        waits = asyncio.run_coroutine_threadsafe(self.scheduler.held.wait(), self._loop)
        await asyncio.wait_for(asyncio.wrap_future(waits), _START_S)

    def release(self) -> None:
        """End a hold, or what `hangs`."""
        self.hangs.clear()
        self.do(self.scheduler.release)

    def said(self, path: str) -> list[Any]:
        """The bodies that came to a path, in order."""
        return [body for called, body in self.calls if called == path]

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._door = asyncio.Condition()
        self._shut = False
        self._jobs: dict[str, Job] = {}
        self._loading: asyncio.Future[Any] | None = None
        self.scheduler = Scheduler(self._checkpoint, self.flags, self._die)
        self._context = int(self.scheduler.model.config.max_position_embeddings)
        app = web.Application(middlewares=[self._middleware], client_max_size=2**26)
        for path, (method, handler) in self._routes().items():
            if path not in self.flags.missing:
                app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        assert runner.server is not None
        listener = socket.create_server(("127.0.0.1", 0))
        server = await self._loop.create_server(runner.server, sock=listener)
        work = asyncio.ensure_future(self.scheduler.run())
        self._started.set_result(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await self._ended.wait()
        work.cancel()
        server.close()
        # Not the runner's cleanup, which lets handlers end: nothing is answered any more.
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def _die(self, reason: str) -> None:
        self.died = self.died or reason
        self._ended.set()

    def _routes(self) -> dict[str, tuple[str, Callable[[web.Request], Awaitable[web.Response]]]]:
        return {
            "/openapi.json": ("GET", self._openapi),
            "/model_info": ("GET", self._model_info),
            "/server_info": ("GET", self._server_info),
            "/generate": ("POST", self._generate),
            "/abort_request": ("POST", self._abort_request),
            "/pause_generation": ("POST", self._pause),
            "/continue_generation": ("POST", self._continue),
            "/flush_cache": ("POST", self._flush),
            "/update_weights_from_disk": ("POST", self._update),
            "/update_weight_version": ("POST", self._rename),
            "/release_memory_occupation": ("POST", self._release_memory),
            "/resume_memory_occupation": ("POST", self._resume_memory),
        }

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        if request.transport is not None:
            self.peers.append(request.transport.get_extra_info("peername")[1])
        while request.path in self.hangs or "*" in self.hangs:
            await asyncio.sleep(0.02)
        key = self.flags.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        request["body"] = body
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _openapi(self, _: web.Request) -> web.Response:
        if not self.flags.openapi:
            raise web.HTTPNotFound
        paths = {path: {} for path in self._routes() if path not in self.flags.missing}
        return web.json_response({"openapi": "3.1.0", "paths": paths})

    async def _model_info(self, _: web.Request) -> web.Response:
        found = {"model_path": self._model_path, "weight_version": self._weight_version}
        return web.json_response(found | {"is_generation": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        states = await self.scheduler.send("state")
        return web.json_response(
            {
                "version": "0.5.23",
                "internal_states": states,
                "enable_deterministic_inference": self.flags.deterministic,
                "enable_memory_saver": self.flags.memory_saver,
                "enable_weights_cpu_backup": self.flags.weights_backup,
                "quantization": self.flags.quantization,
            }
        )

    async def _generate(self, request: web.Request) -> web.Response:
        body = request["body"]
        rid, prompt, params = body.get("rid"), body["input_ids"], body["sampling_params"]
        rid = rid or uuid.uuid4().hex
        if rid in self._jobs:
            return _refused(f"Duplicate request ID detected: {rid}")
        if len(prompt) + params["max_new_tokens"] > self._context or len(prompt) >= self._context:
            return _refused(f"longer than the model's context length ({self._context} tokens)")
        job = Job(rid, prompt, params, asyncio.get_running_loop().create_future())
        self._jobs[rid] = job
        try:
            async with self._door:
                await self._door.wait_for(lambda: not self._shut)
            self.scheduler.send("generate", job)
            while not (await asyncio.wait([job.answer], timeout=0.02))[0]:
                if request.transport is None or request.transport.is_closing():
                    self.scheduler.send("abort", rid)
            return web.json_response(job.answer.result())
        finally:
            del self._jobs[rid]

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = request["body"]
        if body.get("abort_all"):
            self.scheduler.send("abort", "")
        elif body.get("rid") in self._jobs:
            self.scheduler.send("abort", body["rid"])
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (request["body"] or {}).get("mode", "abort")
        async with self._door:
            self._shut = True
            if mode != "abort":
                self.scheduler.send("pause", mode)
            while mode == "abort":
                self.scheduler.send("abort", "")
                if not self._let_in():
                    break
                await asyncio.sleep(0.02)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        async with self._door:
            self._shut = False
            self.scheduler.send("continue")
            self._door.notify_all()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, _: web.Request) -> web.Response:
        if await self.scheduler.send("flush"):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _update(self, request: web.Request) -> web.Response:
        body = request["body"]
        if self.lies:
            return web.json_response({"success": True, "message": ""})
        while not self._shut and self._let_in():
            await asyncio.sleep(0.02)
        result = self._loading = asyncio.get_running_loop().create_future()
        answer = self.scheduler.send("update", body)
        answer.add_done_callback(self._loaded)
        success, message = await result
        if success:
            self._model_path = body["model_path"]
            if body.get("weight_version") is not None:
                self._weight_version = body["weight_version"]
        status = 200 if success else 400
        content = {"success": success, "message": message, "num_paused_requests": 0}
        return web.json_response(content, status=status)

    def _loaded(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled() or self._loading is None:
            return
        if self._loading.done():
            self._die("InvalidStateError: two loads at once")
        else:
            self._loading.set_result(answer.result())

    async def _rename(self, request: web.Request) -> web.Response:
        version = request["body"]["new_version"]
        await self.scheduler.send("rename", version)
        self._weight_version = version
        return web.json_response({"success": True, "message": "", "new_version": version})

    async def _release_memory(self, request: web.Request) -> web.Response:
        await self.scheduler.send("free", request["body"]["tags"])
        return web.json_response(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        await self.scheduler.send("take", request["body"]["tags"])
        return web.json_response(None)

    def _let_in(self) -> bool:
        jobs = self.scheduler.running + self.scheduler.waiting
        return bool(jobs) or any(kind == "generate" for kind, *_ in self.scheduler.inbox)


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)
