"""Makes a running SGLang server an engine, over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    EngineUnsupported,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightUpdate

from .api import Api
from .connect import Connected, ServerSettings, connect


class SglangEngine:
    """Implements `RolloutEngine` and `ColocatedEngine` with a running SGLang server. Experimental.

    It was written from the source of SGLang 0.5.9 to 0.5.23, and tested against a small server that
    keeps the rules found there (tests/rl/engines/sglang_server.py names each with its file). It was
    not run against SGLang itself, which does not start without a GPU.

    Weights travel as folders of safetensors that the server loads with /update_weights_from_disk,
    since SGLang has no place beside its weights to stage others in: staging writes the folder, and
    committing loads it. `directory` must be one that server and client both see, such as /dev/shm
    on one machine; it holds the folders that give the weights served, and one that is staged.

    The version of each token is exact. SGLang's scheduler itself notes how many tokens each request
    has when a load has ended and it takes the new version (`weight_versions` in an answer, 0.5.19
    and newer). It draws no token meanwhile: the client follows a pause by a question that the
    scheduler answers after it, and `mode="retract"` takes the results of the running step in and
    puts every request back into the queue. The cache is then empty, and all of it is computed again
    with the weights that the request goes on with. (`in_place` would keep the old cache.)

    Log-probs are those of SGLang: the log-softmax of the logits divided by the temperature, in the
    precision of its sampler. top-p, top-k, min-p and penalties, which they leave out, are switched
    off. A server started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 leaves the temperature out too: it
    is found out and refused, except at temperature 1.

    One client at a time may drive a server: pauses and weights of others are not seen.

    Example:
        engine = SglangEngine(
            "http://127.0.0.1:30000", checkpoint=Path("qwen3-4b"), directory=Path("/dev/shm/sync")
        )
        sample = await engine.generate(request)
    """

    def __init__(
        self,
        url: str,
        *,
        checkpoint: Path,
        directory: Path,
        name: str | None = None,
        server_directory: str | None = None,
        expected: Iterable[TensorInfo] | None = None,
        initial_version: int = 0,
        seeds: bool = True,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        health_timeout_s: float = 10.0,
    ) -> None:
        """
        Args:
            url: the server's address, as in "http://10.0.0.7:30000".
            checkpoint: the folder the server was started with: config.json and safetensors.
            directory: the folder that updates are written to, below one of this engine's name.
            name: the engine's name, unique in a run; None for host and port.
            server_directory: the server's path of `directory`, if it is another; None if not.
            expected: every tensor that an update brings; None for those of `checkpoint`.
            initial_version: the version of the weights, if the server was started without
                --weight-version.
            seeds: False samples at random if the server cannot keep a request's seed; True refuses
                such a request.
            api_key: the server's key, or its admin key if it has one.
            timeout_s: seconds for calls that take the server little time, and for a connection.
            load_timeout_s: seconds for a load of weights.
            health_timeout_s: seconds for `health`, and for a server's silence while requests run.
        """
        self._name = name or urlsplit(url).netloc or url
        self._api = Api(url, name=self._name, api_key=api_key, timeout_s=timeout_s)
        below = re.sub(r"[^\w.-]", "_", self._name)
        self._settings = ServerSettings(
            checkpoint=checkpoint,
            directory=directory / below,
            server_directory=f"{(server_directory or str(directory)).rstrip('/')}/{below}",
            expected=None if expected is None else tuple(expected),
            initial_version=initial_version,
            seeds=seeds,
            load_timeout_s=load_timeout_s,
            health_timeout_s=health_timeout_s,
        )
        self._paused: bool | None = False  # None: a pause was asked for, and its answer lost
        self._closed = False
        self._control = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._connected: Connected | None = None

    @property
    def name(self) -> str:
        """See `RolloutEngine.name`."""
        return self._name

    async def generate(self, request: Request) -> Sample:
        """See `RolloutEngine.generate`.

        Partials of requests that were paused with "keep" before they were aborted lack up to 50 of
        their last tokens, which SGLang does not send along then.
        """
        return await (await self._ready()).requests.run(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`.

        "abort" takes SGLang up to a second, since it checks every second whether all requests have
        ended; it ends those of other clients, too. "wait" holds new requests back here meanwhile.
        """
        at = await self._ready()
        async with self._control:
            if self._paused:
                return
            if mode == "keep" and not at.facts.spans:
                raise EngineUnsupported(
                    f"engine {self._name}: SGLang {at.facts.release} does not say which tokens it "
                    "drew with which weights, so running requests cannot be kept across a commit; "
                    '0.5.21 and newer can, or pause with mode="abort" or "wait"'
                )
            try:
                if mode == "wait":
                    await at.requests.drain()
                await self._pause(abort=mode == "abort")
            finally:
                at.requests.admit()

    async def resume(self) -> None:
        """See `RolloutEngine.resume`. Errors: `EngineError` if the engine sleeps, too."""
        at = await self._ready()
        async with self._control:
            await at.updates.settle(self._settings.load_timeout_s)
            if reason := at.memory.asleep or at.updates.dirty:
                raise EngineError(
                    f"engine {self._name} must not serve: {reason}; commit or roll back first"
                )
            if self._paused is False:
                return
            await self._api.done("POST", "/continue_generation", {})
            self._paused = False

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. Errors: `OSError` if the folder cannot be written."""
        at = await self._ready()
        async with self._control:
            folder = await at.updates.begin(update)
        if folder is not None:
            await at.updates.fill(folder, buckets)

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`. After `wake`, the last id loads its weights again."""
        at = await self._ready()
        async with self._control:
            if not self._paused and not at.updates.has(update_id):
                raise EngineError(
                    f"engine {self._name} is not paused; pause it before {update_id} is committed"
                )
            at.memory.check_weights(self._name)
            return await at.updates.commit(update_id)

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`. Errors: `EngineError` if the weights do not load."""
        at = await self._ready()
        async with self._control:
            await at.updates.rollback(update_id)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. SGLang's own /health fails in a pause, and is not used."""
        try:
            return await asyncio.wait_for(self._health(), self._settings.health_timeout_s)
        except (EngineError, asyncio.TimeoutError, OSError, ValueError) as error:
            detail = str(error) or f"no answer in {self._settings.health_timeout_s:g} s"
            running = self._connected.requests.running if self._connected else 0
            return EngineHealth(status="DEAD", version=None, detail=detail, running=running)

    async def sleep(self) -> None:
        """See `ColocatedEngine.sleep`.

        Errors: `EngineUnsupported` for a server without --enable-memory-saver.
        """
        at = await self._ready()
        async with self._control:
            at.memory.check_sleeps(at.facts, self._name)
            if at.memory.awake:
                # SGLang's scheduler dies of freeing memory while requests run.
                await self._pause(abort=True)
                await at.memory.free()
                if not at.facts.weights_backup:
                    at.updates.lost("its weights were freed in sleep(), and are undefined")

    async def wake(self, tags: Sequence[str]) -> None:
        """See `ColocatedEngine.wake`.

        Weights come back undefined from a server without --enable-weights-cpu-backup: the engine is
        DIRTY until a commit.
        Errors: `ValueError` for other tags.
        """
        at = await self._ready()
        async with self._control:
            await at.memory.take(tags)

    async def close(self) -> None:
        """See `RolloutEngine.close`. The server stays as it is, with the weights that it has."""
        if self._closed:
            return
        self._closed = True
        if self._connected is not None:
            # A paused server answers at once or, for those that it has not taken in, never.
            limit_s = 1.0 if self._paused else self._settings.health_timeout_s
            await self._connected.requests.end(timeout_s=limit_s)
            self._connected.updates.close()
        await self._api.close()

    async def _ready(self) -> Connected:
        if self._closed:
            raise EngineDead(f"engine {self._name} is closed")
        async with self._connecting:
            if self._connected is None:
                self._connected = await connect(self._api, self._settings)
            return self._connected

    async def _pause(self, *, abort: bool) -> None:
        self._paused = None
        if abort:
            # Comes back once all have ended; it stops the HTTP side only, hence the second one.
            await self._api.done("POST", "/pause_generation", {"mode": "abort"})
        await self._api.done("POST", "/pause_generation", {"mode": "retract"})
        # That one comes back before the scheduler has read it; this is answered after it.
        await self._api.done("GET", "/server_info")
        self._paused = True

    async def _health(self) -> EngineHealth:
        at = await self._ready()
        version: int | None = at.updates.served.version
        if self._control.locked():
            found = await self._api.done("GET", "/model_info")  # the scheduler may be at a load
        else:
            async with self._control:
                await at.updates.settle(self._settings.health_timeout_s)
                await self._api.done("GET", "/server_info")
                found = await self._api.done("GET", "/model_info")
                version = at.updates.served.version
                if not at.updates.dirty and found["weight_version"] != str(version):
                    at.updates.lost(
                        f"its weights are of version {found['weight_version']!r}, and this client "
                        f"loaded {version}"
                    )
        running = at.requests.running
        if reason := at.updates.dirty:
            return EngineHealth(status="DIRTY", version=None, detail=reason, running=running)
        return EngineHealth(
            status="PAUSED" if self._paused or at.memory.asleep else "SERVING",
            version=version,
            detail=at.memory.asleep,
            running=running,
        )
