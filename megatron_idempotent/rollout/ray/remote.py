"""The actor that an engine lives in: its start, calls on it, and what its death means."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from megatron_idempotent.rollout.errors import EngineDead, EngineError, EngineTimeout
from megatron_idempotent.weights import Bucket, WeightUpdate
from megatron_idempotent.workers import ray_cluster

from .actor import HostedEngine
from .held import Held, hold
from .sending import send

_CONTROL = 64
"""Calls beside the requests: pauses, buckets, health."""
_GIVE_UP_S = 30.0
"""Seconds for the engine to say that it has given up an update."""


class Remote:
    """Calls an actor, one at a time. Every call ends once its actor dies, with `EngineDead`."""

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
        """Why there is no actor; "" where there is one, as far as is known."""
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
        """Wait until no call is running, for so long."""
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
        """Returns once nothing of the stage is left there, or the actor does not say so."""
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
    """The actor's end of one stage."""

    def __init__(self, remote: Remote, actor: Any, number: int) -> None:
        self._remote = remote
        self._actor = actor
        self._number = number

    async def hold(self, bucket: Bucket) -> Held:
        try:
            return await hold(self._remote._ray, bucket)
        except self._remote._ray.exceptions.RayError as error:
            raise self._remote._failed(self._actor, error) from error

    async def put(self, place: int, held: Held) -> None:
        await self._remote._answer(
            self._actor, self._actor.put.remote(self._number, place, held.ref)
        )

    async def end(self, count: int) -> None:
        await self._remote._answer(self._actor, self._actor.end.remote(self._number, count))
