r"""An SGLang server as an engine: how a server that the package does not know fits the protocol.

**It was never run on a real SGLang**, which needs a GPU. It was written from the source of 0.5.23,
and its test only looks at what it sends. The server is started with

    python -m sglang.launch_server --model-path DIR --weight-version 0 \
        --enable-deterministic-inference

and both sides see `directory`. SGLang has no place beside its weights for others, so an update is a
folder that is written while it serves, and loaded at the commit.
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
        """`checkpoint` is what the server was started with, and `version` its --weight-version."""
        self.name = name
        self._client = HttpClient(url, engine=name)
        self._checkpoint, self._directory = checkpoint, directory
        with Checkpoint(checkpoint) as tensors:
            self._infos = tuple(tensors.tensors.values())
        self._version, self._last = version, ""
        self._staged: tuple[WeightUpdate, Path] | None = None
        self._torn, self._staging, self._paused, self._running = "", False, False, 0

    async def generate(self, request: Request) -> Sample:
        """Sample one response; the scheduler itself notes which weights drew which tokens."""
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
                except BaseException:  # a cancelled call too: the server would go on
                    await self._done("POST", "/abort_request", {"rid": body["rid"]})
                    raise
                meta, part = answer["meta_info"], answer["output_ids"]
                finish = meta["finish_reason"]["type"]
                tokens += part
                logprobs += [each[0] for each in meta["output_token_logprobs"]]
                for span in meta["weight_versions"] if part else ():
                    versions += [int(span["version"])] * (span["end"] - span["start"])
                if finish != "stop" or not part or tokens[-1] in request.stop_tokens:
                    break  # else an end token of the model's own, which the request does not name
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
        """Stop between two tokens; "wait" takes in new requests meanwhile, and waits for them."""
        if mode == "wait":
            raise EngineError(f'{self.name} is not paused with "wait" here: use "keep" or "abort"')
        if self._paused:
            return
        if mode == "abort":
            await self._done("POST", "/pause_generation", {"mode": "abort"})
        # It frees the cache and queues all requests again; `in_place` would keep the old cache.
        await self._done("POST", "/pause_generation", {"mode": "retract"})
        await self._done("GET", "/server_info")  # answered after the scheduler has read the pause
        self._paused = True

    async def resume(self) -> None:
        """Draw tokens again, if all weights are of one version."""
        if self._torn:
            raise EngineError(f"{self.name} must not serve: {self._torn}; commit again")
        if self._paused:
            await self._done("POST", "/continue_generation", {})
        self._paused = False

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Check an update and write it to a folder of its own; the server knows nothing of it."""
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
        """Load the staged folder. If that fails half-way, the engine is DIRTY until one loads."""
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
        """Forget a staged update. Torn weights stay: the folders before them are not kept here."""
        if self._staged is not None and self._staged[0].id == update_id and not self._torn:
            self._staged = None

    async def health(self) -> EngineHealth:
        """Return the status; SGLang's own /health fails in a pause, and is not asked."""
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
        """End the connections; the server stays as it is."""
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
    """Return the body of /generate that goes on after these tokens.

    It names all that a server may have other defaults for, and has an id of its own, since SGLang
    aborts all ids with the same beginning.
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
