"""Any engine, in an actor of its own on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from megatron_idempotent.rollout.errors import EngineDead, EngineError
from megatron_idempotent.rollout.records import EngineHealth, PauseMode, Request, Sample
from megatron_idempotent.weights import Bucket, WeightUpdate

from .remote import Remote

_CLOSE_S = 30.0
"""Seconds for the engine to give back what is running, and again for that to arrive."""


class RayEngine:
    """A `RolloutEngine` whose engine lives in a Ray actor that `start` makes.

    Its errors are those of the engine. Where the actor, its node or its process dies, running
    requests end with `EngineDead` at once; `restart()` makes a fresh engine, which serves what its
    factory loads until the next update is committed. With `restarts` above 0, `health()` restarts
    it.

    Example:
        ray.init(address="auto")
        engine = RayEngine(
            "megatron_idempotent.rollout.local:TransformersEngine", checkpoint, name="engine-0"
        )
        await engine.start()
        sample = await engine.generate(request)
    """

    def __init__(
        self,
        factory: str,
        argument: Any = None,
        *,
        name: str,
        num_cpus: float = 1,
        num_gpus: float = 0,
        options: Mapping[str, Any] | None = None,
        max_running: int = 4096,
        restarts: int = 0,
        start_timeout_s: float = 300.0,
        health_timeout_s: float = 10.0,
    ) -> None:
        """
        Args:
            factory: `package.module:callable`, importable on the actor's node; it gets `argument`
                and returns an engine, or a coroutine that does.
            argument: anything that can be pickled.
            name: unique among the engines of a run.
            num_cpus: of the actor, as Ray counts them.
            num_gpus: of the actor.
            options: of the actor, as Ray's `options()` takes them: `resources`, `runtime_env`,
                `scheduling_strategy`.
            max_running: requests that are sent to the actor at once; others wait here.
            restarts: how often `health()` may restart an engine that was lost.
            start_timeout_s: for the actor and its engine to come up.
            health_timeout_s: without an answer for so long, it is DEAD.
        """
        if ":" not in factory:
            raise ValueError(f"RayEngine() got factory {factory!r}: `package.module:callable`")
        if max_running < 1 or restarts < 0:
            raise ValueError(
                f"RayEngine() got max_running={max_running} and restarts={restarts}: at least 1 "
                "and at least 0"
            )
        self._name = name
        self._health_timeout_s = health_timeout_s
        self._restarts_left = restarts
        self._restarting: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(max_running)
        self._started = False
        self._closed = False
        self._remote = Remote(
            factory,
            argument,
            name=name,
            options={**(options or {}), "num_cpus": num_cpus, "num_gpus": num_gpus},
            max_running=max_running,
            start_timeout_s=start_timeout_s,
        )

    @property
    def name(self) -> str:
        """Unique among the engines of a run."""
        return self._name

    async def start(self) -> None:
        """Start the actor and make the engine in it. Started already: no-op.

        Errors: `ModuleNotFoundError` without Ray, `RuntimeError` without a cluster; `EngineError`
            where the cluster has no room in time, and what the factory raises, as `EngineError`
            too unless it is one of an engine's own errors.
        """
        if self._closed:
            raise EngineDead(f"{self._name} was closed; make a new engine")
        self._started = True
        await self._remote.start()

    async def restart(self) -> None:
        """End the actor, whatever it does, and start a fresh one. Errors: those of `start`."""
        self._remote.kill("it is being restarted")
        await self.start()

    async def generate(self, request: Request) -> Sample:
        """See `RolloutEngine.generate`."""
        async with self._room:
            sample: Sample = await self._remote.call("generate", request)
        return sample

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`."""
        await self._remote.call("pause", mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._remote.call("resume")

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. The actor holds what the engine keeps and two buckets more.

        Errors: beside those, what the iterator raises; nothing is staged then.
        """
        await self._remote.stage(update, buckets)

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`."""
        version: int = await self._remote.call("commit", update_id)
        return version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`."""
        await self._remote.call("rollback", update_id)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. Begins a restart of a lost engine where one is left."""
        if self._closed:
            return _dead("closed")
        if self._remote.trouble:
            self._begin_restart()
            return _dead(self._remote.trouble)
        try:
            health: EngineHealth = await self._remote.call(
                "health", timeout_s=self._health_timeout_s
            )
        except Exception as error:  # noqa: BLE001 - health never raises
            return _dead(str(error))
        return health

    async def close(self) -> None:
        """See `RolloutEngine.close`. Ends the actor, in any case within a minute."""
        if self._closed:
            return
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
        try:
            if not self._remote.trouble:
                await self._remote.call("close", timeout_s=_CLOSE_S)
                await self._remote.settle(_CLOSE_S)
        except EngineError:
            pass  # it is ended all the same
        finally:
            self._remote.kill("was closed; make a new engine")

    def _begin_restart(self) -> None:
        running = self._restarting is not None and not self._restarting.done()
        if self._started and self._restarts_left and not running:
            self._restarts_left -= 1
            self._restarting = asyncio.ensure_future(self._try_restart())

    async def _try_restart(self) -> None:
        try:
            await self.start()
        except Exception as error:  # noqa: BLE001 - told by the next health
            self._remote.kill(f"could not be restarted: {type(error).__name__}: {error}")


def _dead(why: str) -> EngineHealth:
    return EngineHealth(status="DEAD", version=None, detail=why)
