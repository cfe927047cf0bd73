"""Runs any engine in an actor of its own on a Ray cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    EngineTimeout,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.workers import ray_cluster

from .actor import HostedEngine
from .buckets import BucketRef, hold, send

_CONTROL = 64
"""The number of calls that run beside requests: pauses, buckets, health."""
_GIVE_UP_S = 30.0
"""Seconds for the engine to say that it has given up an update."""


class Remote:
    """Calls the engine in an actor, of which there is one at a time.

    If the actor dies, all of its calls end with `EngineDead`.
    """

    def __init__(
        self,
        factory: str,
        argument: Any,
        *,
        name: str,
        options: Mapping[str, Any],
        max_running: int,
        start_timeout_s: float,
    ) -> None:
        """See `RayEngine`."""
        self._factory = factory
        self._argument = argument
        self._name = name
        self._options = {**options, "max_concurrency": max_running + _CONTROL}
        self._start_timeout_s = start_timeout_s
        self._ray: Any = None
        self._actor: Any = None
        self._why_none = "was not started; call start()"
        self._numbers = itertools.count()
        self._running: set[asyncio.Future[Any]] = set()
        self._starting = asyncio.Lock()

    @property
    def trouble(self) -> str:
        """The reason why there is no actor; "" if there is one, as far as is known."""
        return "" if self._actor is not None else self._why_none

    async def start(self) -> None:
        """Make the actor, and the engine in it. Errors: see `RayEngine.start`."""
        async with self._starting:
            if self._actor is not None:
                return
            self._ray = ray_cluster.import_ray()
            ray_cluster.check_connected(self._ray, self._name)
            actor = self._make_actor()
            try:
                await self._open(actor)
            except BaseException:
                ray_cluster.kill(self._ray, [actor])
                raise
            self._actor = actor

    def kill(self, why: str) -> None:
        """End the actor at once; its running calls end with `EngineDead`."""
        actor, self._actor, self._why_none = self._actor, None, why
        if actor is not None:
            ray_cluster.kill(self._ray, [actor])

    async def settle(self, timeout_s: float) -> None:
        """Wait until no call is running, for at most `timeout_s` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Run a method of the engine. A cancelled call is cancelled there too.

        Errors: the engine's own; `EngineDead`, `EngineTimeout`.
        """
        actor, number = self._checked(), next(self._numbers)
        try:
            return await self._answer(
                actor, actor.call.remote(number, method, arguments), timeout_s=timeout_s
            )
        except (asyncio.CancelledError, EngineTimeout):
            actor.give_up.remote(number)
            raise

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Run the engine's `stage`, with buckets from here. Errors: see `RayEngine.stage`."""
        actor, number = self._checked(), next(self._numbers)
        try:
            await self._answer(actor, actor.expect.remote(number))
            staging = asyncio.ensure_future(self._answer(actor, actor.stage.remote(number, update)))
            wanted = asyncio.ensure_future(self._answer(actor, actor.wanted.remote(number)))
            try:
                await asyncio.wait((staging, wanted), return_when=asyncio.FIRST_COMPLETED)
                if not staging.done() and wanted.result():
                    await send(buckets, _Receiver(self, actor, number), staging)
                await staging
            finally:
                given_up = not staging.done()
                for task in (staging, wanted):
                    task.cancel()
                for done in (await asyncio.wait((staging, wanted)))[0]:
                    done.cancelled() or done.exception()  # looked at: the first error is raised
                if given_up or staging.cancelled():
                    await self._give_up(actor, number)
        finally:
            actor.forget.remote(number)

    async def _give_up(self, actor: Any, number: int) -> None:
        """Cancels a stage in the actor, and waits until it has ended, for a bounded time."""
        gone = ray_cluster.future(actor.give_up.remote(number))
        await asyncio.wait({gone}, timeout=_GIVE_UP_S)

    def _make_actor(self) -> Any:
        return self._ray.remote(HostedEngine).options(max_restarts=0, **self._options).remote()

    async def _open(self, actor: Any) -> None:
        argument = await asyncio.to_thread(self._ray.cloudpickle.dumps, self._argument)
        opened = ray_cluster.future(actor.open.remote(self._factory, argument))
        await asyncio.wait({opened}, timeout=self._start_timeout_s)
        if not opened.done():
            asked = {**self._options}
            del asked["max_concurrency"]
            words = ", ".join(f"{key}={value}" for key, value in asked.items())
            raise EngineError(
                f"{self._name} has not started within {self._start_timeout_s:g} s; it asks for "
                f"{words}, and the cluster has {await ray_cluster.resources(self._ray)}"
            )
        error = opened.exception()
        if error is not None:
            raise EngineDead(
                f"{self._name} died while it started: {ray_cluster.in_short(error)}"
            ) from error
        opened.result().unwrap(self._name)

    def _checked(self) -> Any:
        if self._actor is not None and not self._ray.is_initialized():
            self.kill("is lost: this process has left the Ray cluster")
        if self._actor is None:
            raise EngineDead(f"{self._name} {self._why_none}")
        return self._actor

    async def _answer(self, actor: Any, ref: Any, *, timeout_s: float | None = None) -> Any:
        waiting = ray_cluster.future(ref)
        self._running.add(waiting)
        waiting.add_done_callback(self._running.discard)
        await asyncio.wait({waiting}, timeout=timeout_s)
        if not waiting.done():
            raise EngineTimeout(f"{self._name} has not answered within {timeout_s:g} s")
        error = waiting.exception()
        if error is not None:
            raise self._failed(actor, error) from error
        answer = waiting.result()
        return answer.unwrap(self._name) if hasattr(answer, "unwrap") else answer

    def _failed(self, actor: Any, error: BaseException) -> EngineError:
        known = self._ray.exceptions
        why = f"{type(error).__name__}: {ray_cluster.in_short(error)}"
        if isinstance(error, known.ActorUnavailableError):
            return EngineTimeout(f"{self._name} cannot be reached for now: {why}")
        if not isinstance(error, known.RayActorError):
            return EngineError(f"{self._name} could not be called: {why}")
        if actor is self._actor:
            self.kill(f"died: {why}; restart() makes a fresh one")
        return EngineDead(f"{self._name} died: {why}")


class _Receiver:
    """Passes the buckets of one stage to the actor."""

    def __init__(self, remote: Remote, actor: Any, number: int) -> None:
        self._remote = remote
        self._actor = actor
        self._number = number

    async def hold(self, bucket: Bucket) -> BucketRef:
        try:
            return await hold(self._remote._ray, bucket)
        except self._remote._ray.exceptions.RayError as error:
            raise self._remote._failed(self._actor, error) from error

    async def put(self, place: int, held: BucketRef) -> None:
        await self._remote._answer(
            self._actor, self._actor.put.remote(self._number, place, held.ref)
        )

    async def end(self, count: int) -> None:
        await self._remote._answer(self._actor, self._actor.end.remote(self._number, count))


_CLOSE_S = 30.0
"""Seconds for the engine to give back what is running, and again for that to arrive."""


class RayEngine:
    """Implements `RolloutEngine` with an engine in a Ray actor, which `start` makes.

    Its errors are those of the engine. If the actor, its node or its process dies, running requests
    end with `EngineDead` at once; `restart()` makes a fresh engine, which serves what its factory
    loads until the next update is committed. With `restarts` above 0, `health()` restarts it.

    Example:
        ray.init(address="auto")
        engine = RayEngine(
            "megatron_idempotent.rl.engines.transformers:TransformersEngine",
            checkpoint,
            name="engine-0",
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
            argument: the factory's argument: anything that can be pickled.
            name: the engine's name, unique in a run.
            num_cpus: the actor's CPUs, as Ray counts them.
            num_gpus: the actor's GPUs.
            options: the actor's options, as Ray's `options()` takes them: `resources`,
                `runtime_env`, `scheduling_strategy`.
            max_running: the most requests that are sent to the actor at once; others wait here.
            restarts: how often `health()` may restart an engine that was lost.
            start_timeout_s: seconds for the actor and its engine to come up.
            health_timeout_s: seconds without an answer after which `health` reports DEAD.
        """
        if ":" not in factory:
            raise ValueError(
                f"RayEngine() got factory {factory!r}; allowed: package.module:callable"
            )
        if max_running < 1 or restarts < 0:
            raise ValueError(
                f"RayEngine() got max_running={max_running} and restarts={restarts}; "
                "allowed: 1 or more, and 0 or more"
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
        """See `RolloutEngine.name`."""
        return self._name

    async def start(self) -> None:
        """Start the actor and make the engine in it. Started already: no-op.

        Errors: `ModuleNotFoundError` without Ray, `RuntimeError` without a cluster; `EngineError`
            if the cluster has no room in time; what the factory raises, which becomes an
            `EngineError` unless it is one of an engine's own errors.
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

        Errors: those, and what the iterator raises; nothing is staged then.
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
        """See `RolloutEngine.health`. Begins to restart a lost engine, if `restarts` allows it."""
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
