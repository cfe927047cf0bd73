"""Starts a vLLM server and sends it commands; failures become `EngineError`s."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from megatron_idempotent.json_text import parse_json
from megatron_idempotent.rl.vllm_plugin import BACKEND, EXTENSION

from .http import HttpClient, HttpResponse
from .protocol import EngineDead, EngineError, EngineUnsupported, PauseMode

SERVER_HELP = (
    "start the server with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --weight-transfer-config "
    '\'{"backend": "megatron_idempotent"}\' and --worker-extension-cls '
    f"{EXTENSION}, on a private network only"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time limits of calls to a vLLM server, in seconds; a longer call raises `EngineTimeout`.
    Example: `Timeouts()`.
    """

    generate_s: float | None = None
    """Seconds for one response, including the time that the engine is paused; None: no limit."""
    control_s: float = 60.0
    """Seconds for one short command, such as pause or resume."""
    wait_s: float = 1800.0
    """Seconds for a pause in mode "wait": until running requests have ended."""
    commit_s: float = 600.0
    """Seconds for loading staged weights into the model."""
    bucket_s: float = 300.0
    """Seconds from the announcement of a bucket until all workers have received it."""
    silence_s: float = 300.0
    """Seconds without a bucket after which workers drop the update, assuming a dead trainer."""
    health_s: float = 10.0
    """Seconds for a health check."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"Timeouts() got {field.name}={value}; allowed: seconds above 0")


PATHS = (
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/is_paused",
    "/pause",
    "/reset_encoder_cache",
    "/reset_prefix_cache",
    "/resume",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/weight_info",
)
"""The HTTP paths that a server needs for weight updates."""
_DYING_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between the health checks of a server that may be dying."""


class BadRequest(EngineError):
    """The server rejected the request as invalid (HTTP 400 or 422), and would reject it again."""


class Control(HttpClient):
    """Sends commands to one vLLM server over HTTP.

    Every method may raise `EngineDead`, `EngineTimeout`, `EngineUnsupported` or `EngineError`.

    Example: `await Control("http://127.0.0.1:8000", Timeouts(), engine="a").pause("keep")`.
    """

    def __init__(
        self, url: str, timeouts: Timeouts, *, engine: str, api_key: str | None = None
    ) -> None:
        """Make a client for the server at `url`, without connecting.

        Raises:
            ModuleNotFoundError: aiohttp is not installed.
        """
        super().__init__(url, engine=engine, api_key=api_key)
        self.timeouts, self.engine = timeouts, engine
        self._schema: Mapping[str, Any] | None = None
        self._asking = asyncio.Lock()

    async def get(self, path: str, *, limit: str = "control_s") -> Any:
        """Send a GET request to the server, and return the parsed response.

        Raises:
            EngineError: as in `post`.
        """
        return await self.post(path, limit=limit, method="GET")

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        limit: str = "control_s",
        method: str = "POST",
        **query: str,
    ) -> Any:
        """Send one HTTP request to the server, and return the parsed response, or None for an empty
        response. A status other than 200 raises an error.

        `limit` names the field of `Timeouts` that applies.

        Raises:
            BadRequest: the server rejected the request (400 or 422).
            EngineUnsupported: the server lacks the path, or forbids it.
            EngineDead: the server or its engine no longer responds.
            EngineTimeout: the response did not arrive in time.
            EngineError: any other status than 200.
        """
        timeout_s = getattr(self.timeouts, limit)
        answer = await self.call(method, path, body, query=query, timeout_s=timeout_s)
        if answer.status == 200:
            return answer.body
        raise await self._failure(path, answer)

    async def _failure(self, path: str, answer: HttpResponse) -> Exception:
        status, message = answer.status, answer.message
        fact = f"{self.where} answered {path} with {status}: {message}"
        if status == 400 or status == 422:
            return BadRequest(fact)
        if status in (403, 404, 405):
            return EngineUnsupported(f"{fact}; {SERVER_HELP}")
        if status == 503 or path == "/health":
            return EngineDead(fact)
        # A server outlives its engine for a moment and still responds. It cancels calls to a dying
        # worker some time before its health check fails.
        for wait_s in _DYING_S if "cancelled" in message else (0.0,):
            await asyncio.sleep(wait_s)
            try:
                await self.get("/health", limit="health_s")
            except EngineError as error:
                return EngineDead(f"{fact}; {error}")
        return EngineError(fact)

    async def need(self, *paths: str) -> Mapping[str, Any]:
        """Raise `EngineUnsupported` unless the server has the HTTP paths `paths`; return the
        server's OpenAPI schema.

        Raises:
            EngineUnsupported: the server lacks one of `paths`; the message lists those.
        """
        async with self._asking:  # the schema is long, and a thousand requests may start at once
            if self._schema is None:
                self._schema = await self.get("/openapi.json")
        missing = [path for path in paths if path not in self._schema["paths"]]
        if missing:
            raise EngineUnsupported(f"{self.where} lacks {', '.join(missing)}; {SERVER_HELP}")
        return self._schema

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Send a command to every worker of the server, where `StagingExtension` executes it;
        return the workers' responses.
        """
        await self.need(*PATHS)
        body = {"method": "megatron_idempotent", "args": [json.dumps(command)]}
        try:
            answer = await self.post("/collective_rpc", body)
        except EngineError as error:
            if "no attribute 'megatron_idempotent'" in str(error):
                raise EngineUnsupported(
                    f"engine {self.engine} was started without --worker-extension-cls "
                    f"{EXTENSION}; start it with that option"
                ) from error
            raise
        results: list[Mapping[str, Any]] = answer["results"]
        return results

    async def pause(self, mode: PauseMode) -> None:
        """Make the server stop sampling; `mode` selects what happens to running requests. The
        key-value caches are kept.
        """
        limit = "wait_s" if mode == "wait" else "control_s"
        await self.post("/pause", limit=limit, mode=mode, clear_cache="false")

    async def is_paused(self) -> bool:
        """Return True if the server is paused, or is about to be because a pause has begun."""
        await self.need(*PATHS)
        return bool((await self.get("/is_paused"))["is_paused"])

    async def stamp(self) -> str:
        """Return the text that vLLM attaches to each token that it samples now, as the weight
        version.
        """
        return str((await self.get("/weight_info"))["weight_version"])


CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""vLLM's environment for small models on few CPU cores: 1 GiB of cache, one thread."""
#: The server's parent process. Its stdin is a pipe from the process that started it: when that one
#: ends, in whatever way, the parent kills the server and all of its child processes.
_GUARD = """
import ctypes, os, signal, subprocess, sys, threading
def end_with_this():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=end_with_this)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes to the server, which ends in its own time
def end_with_owner():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_owner, daemon=True).start()
code = server.wait()
os._exit(code if code >= 0 else 128 - code)
"""
#: Seconds from SIGTERM to SIGKILL.
_STOP_S = 10.0
#: A line of vLLM's log that names an exception, from any of its processes.
_ERROR = re.compile(r"\bERROR\b.*\b\w+(Error|Exception): ")


class VllmServer:
    """Runs a vLLM server for a checkpoint in a process of its own, until the `with` block, or this
    process, ends.

    Example:
        with VllmServer("/models/Qwen3-0.6B") as server:
            engine = VllmEngine(server.url, transport=SharedMemorySender)
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        python: str = sys.executable,
        host: str = "127.0.0.1",
        port: int = 0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        extension: str = EXTENSION,
        log: str | os.PathLike[str] | None = None,
        deadline_s: float = 300.0,
    ) -> None:
        """Keep the server's settings; entering the `with` block starts the server.

        Args:
            checkpoint: a directory, or a model's name in Hugging Face's hub.
            python: the interpreter of an environment with vLLM and this package.
            host: the address to listen on; anyone who can reach it can change the weights.
            port: the port to listen on; 0 for a free one.
            arguments: more arguments for vLLM, such as
                `("--dtype", "float32", "--enforce-eager")`.
            environment: variables that are added to this process's, such as `CPU_ENVIRONMENT`.
            extension: a subclass of `StagingExtension`, by its qualified name.
            log: a file for the server's output, which is kept; None for a temporary file.
            deadline_s: seconds from the server's start until it must respond.
        """
        self.checkpoint = os.fspath(checkpoint)
        self._python, self._host, self._port = python, host, port
        self._arguments, self._extension = list(arguments), extension
        self._environment = dict(environment or {})
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log_name = log
        self._log: IO[bytes] | None = None
        self._alias = ""

    @property
    def url(self) -> str:
        """The URL for `VllmEngine`, valid once the server is started."""
        return f"http://{self._host}:{self._port}"

    @property
    def running(self) -> bool:
        """True if this server's process runs and is the one that listens on the port, and the
        server reports that it is healthy.

        Another process that responds at the same address does not count.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return False
        try:
            self._get("/health")
            listens = _listens(process.pid, self._port)
            if listens is None:
                models = parse_json(self._get("/v1/models"))
                listens = self._alias in [model["id"] for model in models["data"]]
        # Refused, reset or 503; or another kind of server responds.
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return False
        return listens

    def _get(self, path: str) -> bytes:
        # No proxy, even if the environment sets one: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}{path}", timeout=5.0) as answer:
            return bytes(answer.read(1 << 20))

    @property
    def pid(self) -> int:
        """The process id of the server's parent process, which leads the process group of all of
        vLLM's processes.
        """
        return self._started.pid

    def __enter__(self) -> VllmServer:
        """Start the vLLM server in a process of its own, and wait until it responds.

        Raises:
            RuntimeError: the server ended or did not respond in time; the message has its log's
                end.
        """
        if not self._port:
            with socket.socket() as probe:
                probe.bind((self._host, 0))
                self._port = probe.getsockname()[1]
        name = self._log_name
        self._log = tempfile.TemporaryFile() if name is None else open(name, "ab+")
        # By module: in some builds the `vllm` command does not start.
        command = [self._python, "-c", _GUARD]
        command += [self._python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.checkpoint, "--host", self._host, "--port", str(self._port)]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        # No defaults for sampling from the checkpoint.
        command += ["--generation-config", "vllm"]
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        command += ["--worker-extension-cls", self._extension]
        # An unguessable model name identifies the server on systems that do not tell who listens.
        self._alias = f"megatron-idempotent-{secrets.token_hex(16)}"
        command += ["--served-model-name", self.checkpoint, self._alias, *self._arguments]
        variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self._python != sys.executable:  # whose modules are of another Python
            for name in ("PYTHONPATH", "PYTHONHOME"):
                variables.pop(name, None)
        if Path(self.checkpoint).is_dir():
            variables["HF_HUB_OFFLINE"] = "1"
        try:
            self._process = subprocess.Popen(
                command,
                env=variables | self._environment,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = time.monotonic() + self._deadline_s
            while not self.running:
                code, late = self._process.poll(), time.monotonic() > deadline
                if code is not None or late:
                    limit = f"has not answered in {self._deadline_s:g} s"
                    fact = limit if code is None else f"ended with {code}"
                    raise RuntimeError(f"vLLM at {self.url} {fact}; its log ends:\n{self.log()}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def log(self, lines: int = 30) -> str:
        """Return the last `lines` lines of the server's log. If a line before these names an
        exception, put the first such line at the beginning.

        The error of a worker is logged long before the server's last lines.
        """
        if self._log is None:
            return ""
        file = self._log.fileno()  # pread: the server writes at the file's shared position
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        log_lines = text.splitlines()
        error_line = next(filter(_ERROR.search, log_lines[:-lines]), None)
        return "\n".join([*filter(None, [error_line]), *log_lines[-lines:]])

    def wait(self) -> int:
        """Block until the server has ended; return its exit code."""
        return self._started.wait()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running; enter it first")
        return self._process

    def stop(self) -> None:
        """End the server and all of its child processes, by SIGTERM and then SIGKILL. If it is not
        running: no-op.
        """
        process, self._process = self._process, None
        if process is not None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            # Even if it has ended: its workers may still run.
            _signal(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._log is not None:
            self._log.close()
            self._log = None


def _listens(session: int, port: int) -> bool | None:
    """Return True if a process of the session `session` listens on the TCP port `port`; False if
    only processes of other sessions do. Return None if that is unknown: `/proc` shows no listener,
    or cannot be read.
    """
    sockets = set()
    try:
        for table in filter(Path.exists, map(Path, ("/proc/net/tcp", "/proc/net/tcp6"))):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{inode}]")
        members = [
            process for process in Path("/proc").iterdir() if _session(process.name) == session
        ]
        for handle in (file for member in members for file in (member / "fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(handle) in sockets:
                    return True
    except OSError:
        return None
    return False if sockets else None


def _session(pid: str) -> int | None:
    try:
        return os.getsid(int(pid))
    except (ValueError, ProcessLookupError):  # not a process, or one that has ended
        return None


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
