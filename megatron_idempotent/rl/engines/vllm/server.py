"""Runs a vLLM server as a child process, for tests, examples and single machines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_idempotent.rl.vllm_plugin import BACKEND, EXTENSION

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""The environment of vLLM on few CPU cores and small models: 1 GiB of cache, one thread."""
_LOG_LINES = 30


class VllmServer:
    """Serves a checkpoint until the `with` block ends.

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
        stop_s: float = 10.0,
    ) -> None:
        """
        Args:
            checkpoint: a directory, or a model's name in Hugging Face's hub.
            python: the interpreter of an environment with vLLM and this package.
            host: the address to listen at: anyone who reaches it can change the weights.
            port: the port to listen at; 0 for a free one.
            arguments: more arguments for vLLM, such as
                `("--dtype", "float32", "--enforce-eager")`.
            environment: variables besides this process's own, such as `CPU_ENVIRONMENT`.
            extension: a subclass of `StagingExtension`, by its qualified name.
            log: a file for the server's output, which stays; None for a temporary one.
            deadline_s: seconds from the server's start until it must answer.
            stop_s: seconds that the server gets to end by itself.
        """
        self.checkpoint = os.fspath(checkpoint)
        self._python, self._host, self._port = python, host, port
        self._arguments, self._extension = list(arguments), extension
        self._environment = dict(environment or {})
        self._deadline_s, self._stop_s = deadline_s, stop_s
        self._process: subprocess.Popen[bytes] | None = None
        self._keep_log = log is not None
        self._log = None if log is None else Path(log)

    @property
    def url(self) -> str:
        """The URL for `VllmEngine`, known once the server is started."""
        return f"http://{self._host}:{self._port}"

    @property
    def running(self) -> bool:
        """True if the server answers, and says that its engine is well."""
        return self._process is not None and _answers(f"{self.url}/health")

    @property
    def pid(self) -> int:
        """The process id of the server, which leads a group with all of vLLM's processes."""
        if self._process is None:
            raise RuntimeError("the server is not running; enter it first")
        return self._process.pid

    def __enter__(self) -> VllmServer:
        """Start the server, and wait until it answers.

        Errors: `RuntimeError` with the end of its log.
        """
        self._port = self._port or _free_port(self._host)
        if self._log is None:
            stream, name = tempfile.mkstemp(prefix="vllm-", suffix=".log")
            os.close(stream)
            self._log = Path(name)
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(),
                    env=self._variables(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def log(self, lines: int = _LOG_LINES) -> str:
        """Return the last lines of the server's log."""
        if self._log is None or not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the server and every process that it has started. Not running: no-op."""
        process, self._process = self._process, None
        if process is not None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_s)
            # Also where it has ended: its workers may not have noticed.
            _signal(process.pid, signal.SIGKILL)
            process.wait()
        if self._log is not None and not self._keep_log:
            self._log.unlink(missing_ok=True)
            self._log = None

    def _command(self) -> list[str]:
        # By module: in some builds the `vllm` command does not start.
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.checkpoint, "--host", self._host, "--port", str(self._port)]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        # No defaults for sampling from the checkpoint.
        command += ["--generation-config", "vllm"]
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        return [*command, "--worker-extension-cls", self._extension, *self._arguments]

    def _variables(self) -> dict[str, str]:
        variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if Path(self.checkpoint).is_dir():
            variables["HF_HUB_OFFLINE"] = "1"
        return variables | self._environment

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._deadline_s
        while not _answers(f"{self.url}/health"):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                fact = (
                    f"has not answered in {self._deadline_s:g} s"
                    if code is None
                    else f"ended with {code}"
                )
                raise RuntimeError(f"vLLM at {self.url} {fact}; its log ends:\n{self.log()}")
            time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        # No proxy, whatever the environment says: it is this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, reset, or 503
        return False


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
