r"""Use an SGLang server as an engine: an example of the engine protocol for other servers.

**It was never run with a real SGLang**, which needs a GPU. It was written from the source of
0.5.23, and its test only checks the requests that it sends. Start the server with

    python -m sglang.launch_server --model-path DIR --weight-version 0 \
        --enable-deterministic-inference

Engine and server must see `directory` under the same path. SGLang cannot keep a second set of
weights in memory, so staging writes an update to a folder while the server serves, and the commit
loads that folder.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from megatron_idempotent.rl.engines import EngineError, EngineHealth, PauseMode, Request, Sample
from megatron_idempotent.rl.engines.http import HttpClient
from megatron_idempotent.rl.engines.protocol import refuse_kv_scales
from megatron_idempotent.rl.weights import Bucket, Staging, UpdateRefused, WeightUpdate
from megatron_idempotent.rl.weights.safetensors_io import Checkpoint, copy_settings, write_tensors


class SglangEngine:
    """Implements `RolloutEngine` with a running SGLang server, which one client drives."""

    def __init__(
        self, url: str, *, checkpoint: Path, directory: Path, name: str = "sglang", version: int = 0
    ) -> None:
        """Take the server's URL, and the `--model-path` and `--weight-version` of its start."""
        self.name = name
        self._client = HttpClient(url, engine=name)
        self._checkpoint, self._directory = checkpoint, directory
        with Checkpoint(checkpoint) as tensors:
            self._infos = tuple(tensors.tensors.values())
        self._version, self._last = version, ""
        self._staged: tuple[WeightUpdate, Path] | None = None
        self._torn, self._staging, self._paused, self._running = "", False, False, 0

    async def generate(self, request: Request) -> Sample:
        """Sample one response; SGLang's scheduler reports the weight version of each token."""
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish: Any = "abort"
        self._running += 1
        try:
            while len(tokens) < request.max_tokens:
                body = _body(request, tokens)
                try:
                    answer = await self._done("POST", "/generate", body, timeout_s=None)
                except BaseException:  # also a cancellation: the server would continue to sample
                    await self._done("POST", "/abort_request", {"rid": body["rid"]})
                    raise
                meta, part = answer["meta_info"], answer["output_ids"]
                finish = meta["finish_reason"]["type"]
                tokens += part
                logprobs += [each[0] for each in meta["output_token_logprobs"]]
                for span in meta["weight_versions"] if part else ():
                    versions += [int(span["version"])] * (span["end"] - span["start"])
                if finish != "stop" or not part or tokens[-1] in request.stop_tokens:
                    break  # else the model's own end token, which the request does not include
        finally:
            self._running -= 1
        if finish == "stop" and tokens[-1] not in request.stop_tokens:
            finish = "length"
        return Sample(
            request_id=request.id,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=finish,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling between two tokens.

        Mode "wait" is not supported: SGLang would also wait for requests that arrive meanwhile.
        """
        if mode == "wait":
            raise EngineError(f'{self.name} is not paused with "wait" here: use "keep" or "abort"')
        if self._paused:
            return
        if mode == "abort":
            await self._done("POST", "/pause_generation", {"mode": "abort"})
        # "retract" frees the cache and queues all requests again; "in_place" would keep it.
        await self._done("POST", "/pause_generation", {"mode": "retract"})
        await self._done("GET", "/server_info")  # returns once the scheduler has paused
        self._paused = True

    async def resume(self) -> None:
        """Continue sampling; raise if the weights may mix two versions."""
        if self._torn:
            raise EngineError(f"{self.name} must not serve: {self._torn}; commit again")
        if self._paused:
            await self._done("POST", "/continue_generation", {})
        self._paused = False

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Check an update and write it to its own folder, which `commit` has the server load."""
        if update.id == self._last:
            return
        refuse_kv_scales(self.name, update, "SGLang reads them from a file when it starts")
        above = update.version > self._version and update.base_version in (None, self._version)
        if self._staging or not above:
            raise UpdateRefused(f"{self.name} serves version {self._version}; refused: {update}")
        self._staging = True
        try:
            staging = Staging(update, expected=self._infos)
            async for bucket in buckets:
                staging.add(bucket)
            folder = self._directory / f"v{update.version}"
            folder.mkdir(parents=True, exist_ok=True)
            copy_settings(self._checkpoint, folder)
            write_tensors(folder / "model.safetensors", staging.complete(), durable=True)
            self._staged = update, folder
        finally:
            self._staging = False

    async def commit(self, update_id: str) -> int:
        """Have the server load the staged update. After a failure: DIRTY until a load works."""
        if update_id == self._last and not self._torn:
            return self._version
        if not self._paused or self._staged is None or self._staged[0].id != update_id:
            raise EngineError(f"{self.name} is not paused, or {update_id} is not staged")
        update, folder = self._staged
        await self._done("POST", "/flush_cache")
        self._torn = f"version {update.version} was not loaded to its end, as far as is known"
        body = {
            "model_path": str(folder),
            "weight_version": str(update.version),
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._done("POST", "/update_weights_from_disk", body, timeout_s=600.0)
        self._version, self._last, self._staged, self._torn = update.version, update_id, None, ""
        return self._version

    async def rollback(self, update_id: str) -> None:
        """Drop a staged update. A failed commit is not undone: the previous folder is not known."""
        if self._staged is not None and self._staged[0].id == update_id and not self._torn:
            self._staged = None

    async def health(self) -> EngineHealth:
        """Return the engine's status. SGLang's own /health is not used: it fails during a pause."""
        try:
            await self._done("GET", "/server_info", timeout_s=10.0)
        except EngineError as error:
            return EngineHealth(status="DEAD", version=None, detail=str(error))
        if self._torn:
            return EngineHealth(status="DIRTY", version=None, detail=self._torn)
        return EngineHealth(
            status="PAUSED" if self._paused else "SERVING",
            version=self._version,
            running=self._running,
        )

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._client.close()

    async def _done(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = 60.0
    ) -> Any:
        answer = await self._client.call(method, path, body, timeout_s=timeout_s)
        failed = isinstance(answer.body, dict) and answer.body.get("success") is False
        if answer.status == 400 and path == "/generate":
            raise ValueError(f"{self.name} refuses the request: {answer.message}")
        if answer.status >= 300 or failed:
            raise EngineError(f"{self.name}: {path}: status {answer.status}: {answer.message}")
        return answer.body


def _body(request: Request, drawn: list[int]) -> dict[str, Any]:
    """Return the body of a /generate request that continues after the tokens in `drawn`.

    It sets all sampling parameters, because a server may have other defaults. Its id is random,
    because SGLang aborts all requests whose ids begin with the given id.
    """
    sampling = {
        "max_new_tokens": request.max_tokens - len(drawn),
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(request.stop_tokens) or None,
        "ignore_eos": not request.stop_tokens,  # it also switches stop_token_ids off
        "sampling_seed": uuid.uuid4().int >> 66 if request.seed is None else request.seed,
    }
    return {
        "rid": uuid.uuid4().hex,
        "input_ids": [*request.prompt, *drawn],
        "sampling_params": sampling,
        "return_logprob": True,
    }
