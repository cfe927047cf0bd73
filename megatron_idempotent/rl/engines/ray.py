"""Runs an engine inside a Ray actor, on a node that Ray chooses.

Ray restarts an actor that dies, with its initial weights; the next weight sync then updates it like
any engine at an old version. A transport carries weights to the actor directly, not through Ray
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
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
    """The Ray actor in which `RayEngine` runs an engine. The actor calls the engine's methods, and
    passes the buckets of weights that arrive to the engine's `stage`.
    """

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        """Construct the engine in this actor by calling `make`."""
        self._engine = make()
        self._receiver: Any = None
        self._buckets: asyncio.Queue[Bucket | None] = asyncio.Queue()
        self._staging: asyncio.Future[None] | None = None
        self._answers: dict[int, asyncio.Future[asyncio.Future[Sample]]] = {}

    async def take(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Start to sample a batch of requests. Each request comes with a number, its ticket, with
        which the caller gets the sample from `answer`.

        Requests of one call form one batch, as in an engine of the caller's process: the rounding
        of log-probs depends on the batch.
        """
        for ticket, request in requests:
            answer = self._answer(ticket)
            if answer.cancelled():  # the caller was cancelled
                del self._answers[ticket]
            else:
                answer.set_result(asyncio.ensure_future(self._engine.generate(request)))

    async def answer(self, ticket: int) -> Sample:
        """Wait for the sample of the request with this ticket, and return it. The caller may call
        this before `take` has received the request.
        """
        sampling = await self._answer(ticket)
        try:
            return await sampling
        finally:
            sampling.cancel()  # if this call is cancelled
            del self._answers[ticket]

    def _answer(self, ticket: int) -> asyncio.Future[asyncio.Future[Sample]]:
        # Ray may start calls in another order than they were made.
        if ticket not in self._answers:
            self._answers[ticket] = asyncio.get_running_loop().create_future()
        return self._answers[ticket]

    async def call(self, method: str, *args: Any) -> Any:
        """Call the engine's method with the name `method`, and return the method's result."""
        return await getattr(self._engine, method)(*args)

    async def open(self, update: WeightUpdate, opened: Announcement) -> bool:
        """Make a receiver for an update's buckets, and start the engine's `stage`. Return True if
        `stage` waits for buckets; False if the engine has already committed this update.

        Raises:
            Exception: as the engine's `stage` raises.
        """
        from megatron_idempotent.rl.weights.transports import receiver

        await self.drop()
        self._receiver = receiver(opened)
        self._buckets = asyncio.Queue()
        self._staging = asyncio.ensure_future(self._engine.stage(update, self._fed()))
        # Let `stage` run: it may reject the update, or return at once if it was committed before.
        await asyncio.sleep(0)
        if self._staging.done():
            self._staging.result()
        return not self._staging.done()

    async def receive(self, announced: Announcement) -> None:
        """Receive an announced bucket of weights, pass the bucket to the engine's `stage`, and
        return once the engine has checked the bucket.

        Raises:
            Exception: as the engine's `stage` raises.
        """
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
        """Tell the engine's `stage` that the last bucket has arrived, and wait until the update is
        staged.

        Raises:
            Exception: as the engine's `stage` raises.
        """
        assert self._staging is not None
        self._buckets.put_nowait(None)
        await self._staging
        await self.drop()

    async def drop(self) -> None:
        """Cancel the engine's `stage` if it is running, and close the receiver. If no update is
        being staged: no-op.
        """
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
    """Implements `RolloutEngine` by an engine that runs in a Ray actor (`EngineActor`): each call
    is passed to that engine.

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
    ) -> None:
        """Start the Ray actor; `ready()` waits until the engine in it is constructed.

        Args:
            name: the engine's name, unique in a run.
            make: constructs the engine in the actor, also after a restart.
            transport: makes the sender of each update; the actor is the receiver.
            num_cpus: CPUs that Ray reserves for the actor.
            num_gpus: GPUs that Ray reserves for the actor.

        Raises:
            ModuleNotFoundError: Ray is not installed.
            RuntimeError: Ray is not connected to a cluster.
        """
        self._ray = connected_ray("RayEngine")
        self.name, self._transport = name, transport
        self._closed = False
        self._tickets = itertools.count()
        self._waiting: list[tuple[int, Request]] = []
        # No retries by Ray: the caller decides whether a lost request or commit is sent again.
        self._actor = (
            self._ray.remote(EngineActor)
            .options(
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=_CONCURRENCY,
                scheduling_strategy="SPREAD",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
            )
            .remote(make)
        )

    async def ready(self) -> None:
        """Wait until the engine in the actor is constructed.

        Raises:
            Exception: as `make` raises.
        """
        await self._request("call", "health")

    async def generate(self, request: Request) -> Sample:
        """Send a request to the engine in the actor, and return the sample; see
        `RolloutEngine.generate`.
        """
        ticket = next(self._tickets)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append((ticket, request))
        sample: Sample = await self._request("answer", ticket)
        return sample

    def _send(self) -> None:
        """Send the actor, as one batch, all requests that `generate` has queued in this iteration
        of the event loop.
        """
        requests, self._waiting = self._waiting, []
        if not self._closed:
            self._actor.take.remote(requests)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Make the engine in the actor stop sampling; see `RolloutEngine.pause`."""
        await self._request("call", "pause", mode)

    async def resume(self) -> None:
        """Make the engine in the actor continue sampling; see `RolloutEngine.resume`."""
        await self._request("call", "resume")

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Send an update's buckets over the transport to the actor, whose engine checks and stages
        them; see `RolloutEngine.stage`.

        Raises:
            TransportError: the transport's sender failed.
            Exception: as `RolloutEngine.stage` raises.
        """
        sender = self._transport()
        try:
            if not await self._request("open", update, dict(await sender.open(update))):
                return
            async for bucket in buckets:
                announced = dict(await sender.announce(bucket))
                await both_ends(sender.transmit(bucket), self._request("receive", announced))
                await sender.release(bucket)
            await self._request("complete")
        except BaseException:
            # The first error is raised; a lost actor has nothing staged.
            with contextlib.suppress(EngineDead):
                await self._request("drop")
            raise
        finally:
            await sender.close()

    async def commit(self, update_id: str) -> int:
        """Make the engine in the actor serve the staged update; see `RolloutEngine.commit`."""
        version: int = await self._request("call", "commit", update_id)
        return version

    async def rollback(self, update_id: str) -> None:
        """Make the engine in the actor drop a staged update, or undo a failed commit; see
        `RolloutEngine.rollback`.
        """
        await self._request("call", "rollback", update_id)

    async def health(self) -> EngineHealth:
        """Return the status and version of the engine in the actor; DEAD if the actor does not
        respond within 10 s, as while Ray restarts it. See `RolloutEngine.health`.
        """
        try:
            reply = self._request("call", "health")
            health: EngineHealth = await asyncio.wait_for(reply, _HEALTH_S)
        except Exception as error:  # noqa: BLE001 (any error means a DEAD engine)
            return EngineHealth(status="DEAD", version=None, detail=repr(error))
        return health

    async def close(self) -> None:
        """Close the engine in the actor, and kill the actor; see `RolloutEngine.close`."""
        if self._closed:
            return
        with contextlib.suppress(EngineDead, asyncio.TimeoutError):
            await asyncio.wait_for(self._request("call", "close"), _HEALTH_S)
        self._closed = True
        if self._ray.is_initialized():  # else Ray would start a cluster
            self._ray.kill(self._actor, no_restart=True)

    async def _request(self, method: str, *args: Any) -> Any:
        """Call the actor's method with the name `method`, and return the method's result. Raise
        `EngineDead` if the actor is lost.

        Raises:
            EngineDead: the actor is lost, or this engine was closed.
            Exception: as the engine raises.
        """
        if self._closed:
            raise EngineDead(f"{self.name} was closed; make a new engine")
        try:
            result = getattr(self._actor, method).remote(*args)
            try:
                return await result
            except asyncio.CancelledError:
                self._ray.cancel(result)  # else the actor would sample the request to its end
                raise
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            words = " ".join(str(error).split())[:400]
            raise EngineDead(f"{self.name} does not answer: {words}") from error


#: The most calls that run in an actor at once: requests and commands together.
_CONCURRENCY = 1000
#: Seconds after which an engine without a health report counts as dead.
_HEALTH_S = 10.0
