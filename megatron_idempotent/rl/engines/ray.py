"""Makes a Ray actor an engine: it holds one of its own, on the node that Ray has chosen.

Ray restarts an actor that dies, with the weights that it was made with; a weight sync brings it
back as it does every engine of another version. Weights come to the actor by a transport, and not
through the process that calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.workers.ray import connected_ray

from .protocol import (
    EngineDead,
    EngineHealth,
    PauseMode,
    Request,
    RolloutEngine,
    Sample,
    both_ends,
)

if TYPE_CHECKING:
    from megatron_idempotent.rl.weights.transports.base import Announcement, Sender


class EngineActor:
    """Holds an engine in a Ray actor, and feeds it the buckets that are announced."""

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        """Make the engine."""
        self._engine = make()
        self._receiver: Any = None
        self._buckets: asyncio.Queue[Bucket | None] = asyncio.Queue()
        self._staging: asyncio.Future[None] | None = None
        self._answers: dict[int, asyncio.Future[asyncio.Future[Sample]]] = {}

    async def take(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Begin with requests, each with a ticket for `answer`.

        Those that come together are sampled together, as they are by an engine of this process: the
        rounding of log-probs depends on that.
        """
        for ticket, request in requests:
            answer = self._answer(ticket)
            if answer.cancelled():  # nobody waits for it any more
                del self._answers[ticket]
            else:
                answer.set_result(asyncio.ensure_future(self._engine.generate(request)))

    async def answer(self, ticket: int) -> Sample:
        """Return the sample for a ticket, also of a request that is still to come."""
        sampling = await self._answer(ticket)
        try:
            return await sampling
        finally:
            sampling.cancel()  # if this is
            del self._answers[ticket]

    def _answer(self, ticket: int) -> asyncio.Future[asyncio.Future[Sample]]:
        # Ray does not promise that calls begin in the order in which they were made.
        if ticket not in self._answers:
            self._answers[ticket] = asyncio.get_running_loop().create_future()
        return self._answers[ticket]

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return await getattr(self._engine, method)(*args)

    async def open(self, update: WeightUpdate, opened: Announcement) -> bool:
        """Begin to stage an update whose sender announced it; return False if it needs no bucket.

        Errors: the engine's, for an update that it refuses.
        """
        from megatron_idempotent.rl.weights.transports import receiver

        await self.drop()
        self._receiver = receiver(opened)
        self._buckets = asyncio.Queue()
        self._staging = asyncio.ensure_future(self._engine.stage(update, self._fed()))
        await asyncio.sleep(0)  # in which it refuses the update, or has it already
        if self._staging.done():
            self._staging.result()
        return not self._staging.done()

    async def receive(self, announced: Announcement) -> None:
        """Receive a bucket, and return once the engine has checked it. Errors: the engine's."""
        assert self._staging is not None
        if not self._staging.done():
            bucket = await asyncio.to_thread(self._receiver.receive, announced)
            self._buckets.put_nowait(bucket)
            checked = asyncio.ensure_future(self._buckets.join())
            await asyncio.wait({self._staging, checked}, return_when=asyncio.FIRST_COMPLETED)
            checked.cancel()
        if self._staging.done():
            self._staging.result()

    async def complete(self) -> None:
        """End the staging after the last bucket. Errors: the engine's."""
        assert self._staging is not None
        self._buckets.put_nowait(None)
        await self._staging
        await self.drop()

    async def drop(self) -> None:
        """Give up what is being staged; without that: no-op."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.cancel()
            await asyncio.wait([staging])
        receiving, self._receiver = self._receiver, None
        if receiving is not None:
            await asyncio.to_thread(receiving.close)

    async def _fed(self) -> AsyncIterator[Bucket]:
        while (bucket := await self._buckets.get()) is not None:
            yield bucket
            self._buckets.task_done()


class RayEngine:
    """Implements `RolloutEngine` by an `EngineActor` of the cluster.

    Example:
        make = functools.partial(TransformersEngine, "/shared/checkpoint", name="engine-0")
        engine = RayEngine("engine-0", make, transport=lambda: DiskSender("/shared/sync"))
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], RolloutEngine],
        *,
        transport: Callable[[], Sender],
        num_cpus: float = 1,
        num_gpus: float = 0,
        runtime_env: Mapping[str, Any] | None = None,
        health_timeout_s: float = 10.0,
    ) -> None:
        """Start the actor; the engine in it is there some seconds later.

        Args:
            name: the engine's name, unique in a run.
            make: makes the engine in the actor, also after a restart.
            transport: makes the sender of each update, whose other end the actor is.
            num_cpus: CPUs that Ray reserves for the actor.
            num_gpus: GPUs that Ray reserves for it.
            runtime_env: the actor's environment, as Ray takes it.
            health_timeout_s: seconds for a health report, after which the engine counts as dead.

        Errors: `ModuleNotFoundError` without Ray and `RuntimeError` without a cluster.
        """
        self._ray = connected_ray("RayEngine")
        self._name, self._transport = name, transport
        self._health_timeout_s = health_timeout_s
        self._closed = False
        self._tickets = itertools.count()
        self._waiting: list[tuple[int, Request]] = []
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        # Calls are not repeated: a request or a commit that was lost is its caller's to repeat.
        self._actor = (
            self._ray.remote(EngineActor)
            .options(
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=_CONCURRENCY,
                scheduling_strategy="SPREAD",
                **options,
            )
            .remote(make)
        )

    @property
    def name(self) -> str:
        """See `RolloutEngine.name`."""
        return self._name

    async def ready(self) -> None:
        """Wait until the engine in the actor is made. Errors: what making it raised."""
        await self._ask("call", "health")

    async def generate(self, request: Request) -> Sample:
        """See `RolloutEngine.generate`."""
        ticket = next(self._tickets)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append((ticket, request))
        sample: Sample = await self._ask("answer", ticket)
        return sample

    def _send(self) -> None:
        """Send all that came at once."""
        requests, self._waiting = self._waiting, []
        if not self._closed:
            self._actor.take.remote(requests)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`."""
        await self._ask("call", "pause", mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._ask("call", "resume")

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. Errors: those of the transport's sender, too."""
        sender = self._transport()
        try:
            if not await self._ask("open", update, dict(await sender.open(update))):
                return
            async for bucket in buckets:
                announced = dict(await sender.announce(bucket))
                await both_ends(sender.transmit(bucket), self._ask("receive", announced))
                await sender.release(bucket)
            await self._ask("complete")
        except BaseException:
            # What failed is what is raised; an actor that was lost has nothing staged.
            with contextlib.suppress(EngineDead):
                await self._ask("drop")
            raise
        finally:
            await sender.close()

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`."""
        version: int = await self._ask("call", "commit", update_id)
        return version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`."""
        await self._ask("call", "rollback", update_id)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. An actor that Ray is restarting is DEAD until it answers."""
        try:
            asked = self._ask("call", "health")
            health: EngineHealth = await asyncio.wait_for(asked, self._health_timeout_s)
        except Exception as error:  # noqa: BLE001 (whatever it is, the engine does not answer)
            return EngineHealth(status="DEAD", version=None, detail=repr(error))
        return health

    async def close(self) -> None:
        """See `RolloutEngine.close`. It kills the actor."""
        if self._closed:
            return
        with contextlib.suppress(EngineDead, asyncio.TimeoutError):
            await asyncio.wait_for(self._ask("call", "close"), self._health_timeout_s)
        self._closed = True
        if self._ray.is_initialized():  # else Ray would start a cluster
            self._ray.kill(self._actor, no_restart=True)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Return the actor's answer. Errors: the engine's own; `EngineDead` for a lost actor."""
        if self._closed:
            raise EngineDead(f"{self._name} was closed; make a new engine")
        try:
            answer = getattr(self._actor, method).remote(*args)
            try:
                return await answer
            except asyncio.CancelledError:
                self._ray.cancel(answer)  # a request would be drawn to its end
                raise
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            words = " ".join(str(error).split())[:400]
            raise EngineDead(f"{self._name} does not answer: {words}") from error


#: Requests that an actor works on at once, and the calls beside them.
_CONCURRENCY = 1000
