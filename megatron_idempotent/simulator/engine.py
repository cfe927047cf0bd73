"""An engine without a model: it takes the time that one would take, and keeps the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from megatron_idempotent.engines.protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.weights import Bucket, UpdateDamaged, UpdateRefused, WeightUpdate

from .faults import Faults
from .serving import EngineCosts, Length, SimulatedServing, Stamps, some_length

Take = Callable[[float], Awaitable[None]]
"""Takes that many seconds of an engine. Errors: `EngineDead` where it dies meanwhile."""

Due = Callable[[str], bool]
"""Returns whether a fault of that kind is to happen now."""


class SimulatedUpdates:
    """`stage`, `commit` and `rollback` as the protocol has them, but for the pause.

    Example: `await updates.stage(update, buckets); await updates.commit(update.id)`.
    """

    def __init__(
        self,
        name: str,
        costs: EngineCosts,
        version: int,
        *,
        take: Take,
        due: Due,
        die: Callable[[], None],
    ) -> None:
        self.version = version
        self.dirty = False
        self.committed = ""
        """Id of the last update that was."""
        self._name = name
        self._costs = costs
        self._take = take
        self._due = due
        self._die = die
        self._staging = ""
        self._staged: WeightUpdate | None = None

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Take buckets, one after the other."""
        await self._take(0.0)
        if update.id == self.committed:
            return
        self._refuse(update)
        self._staging, self._staged = update.id, None
        expected = 0
        try:
            async for bucket in buckets:
                await self._take(self._costs.bucket_s)
                if self._due("dies in stage"):
                    self._die()
                    await self._take(0.0)
                if bucket.index != expected or self._due("loses a bucket"):
                    raise UpdateDamaged(f"{self._name}: {update.id} lacks bucket {expected}")
                expected += 1
            await self._take(0.0)
            self._staged = update
        finally:
            self._staging = ""

    async def commit(self, update_id: str) -> int:
        """Serve what is staged; DIRTY meanwhile, as tensors are written one by one."""
        if update_id == self.committed:
            return self.version
        update = self._staged
        if update is None or update.id != update_id:
            raise EngineError(f"engine {self._name} has not staged {update_id}")
        self.dirty = True
        await self._take(self._costs.commit_s)
        if self._due("dies in commit"):
            self._die()
            await self._take(0.0)
        if self._due("stays dirty"):
            raise EngineError(f"engine {self._name} failed half-way in {update_id}")
        self.dirty, self.version, self.committed = False, update.version, update_id
        self._staged = None
        return update.version

    def rollback(self, update_id: str) -> None:
        """Be at the weights before an update that is staged, or half committed."""
        if self._staged is not None and self._staged.id == update_id:
            # The version is still the one before: a commit changes it when it is whole.
            self._staged, self.dirty = None, False

    def _refuse(self, update: WeightUpdate) -> None:
        if self._staging:
            raise UpdateRefused(f"{self._name}: {update.id} while {self._staging} is being staged")
        if not self.dirty and update.version <= self.version:
            raise UpdateRefused(
                f"{self._name}: {update.id} is version {update.version}, and it has {self.version}"
            )
        if update.base_version is not None and (self.dirty or update.base_version != self.version):
            raise UpdateRefused(
                f"{self._name}: {update.id} builds on {update.base_version}, and it has "
                f"{'a mixture' if self.dirty else self.version}"
            )


class SimulatedEngine:
    """A `RolloutEngine` that follows its contract on a virtual clock.

    One entry of a sample's `tokens`, `logprobs` and `versions` stands for `tokens_per_entry`
    tokens, so that long responses cost little; `max_tokens` and `continued` of requests count
    entries too. A response's length depends on its request alone, never on timing.

    Example: `SimulatedEngine("engine-0", costs=EngineCosts(), length=lambda request: 500.0)`.
    """

    def __init__(
        self,
        name: str,
        *,
        costs: EngineCosts | None = None,
        length: Length | None = None,
        tokens_per_entry: int = 1,
        faults: Faults | None = None,
        index: int = 0,
        version: int = 0,
    ) -> None:
        """
        Args:
            name: unique among the engines.
            costs: what its work takes.
            length: of responses in tokens; `math.inf` for one that never ends. What it raises is
                the answer, such as `ValueError` for a request that can never be answered.
            tokens_per_entry: that each entry of a sample stands for.
            faults: those of stage and commit; others are called as methods.
            index: of the engine among those of the faults.
            version: of the weights that it starts with, and comes back with.
        """
        self.name = name
        self.costs = costs or EngineCosts()
        self._faults = faults or Faults(())
        self._index = index
        self._first_version = version
        self._serving = SimulatedServing(self.costs, length or some_length, tokens_per_entry)
        self._lives = 0
        self._dead = ""
        self._factor = 1.0
        self._back_in_s = 0.0
        self._restart()

    def _restart(self) -> None:
        self._paused = False
        self._serving.stamps = Stamps(self._first_version)
        self._updates = SimulatedUpdates(
            self.name,
            self.costs,
            self._first_version,
            take=self._taker(),
            due=self._due,
            die=self._die_of_fault,
        )

    @property
    def tokens(self) -> float:
        """Drawn so far, those of prompts and of lost requests included."""
        return self._serving.sharing.tokens

    @property
    def busy_s(self) -> float:
        """Seconds in which it drew tokens."""
        return self._serving.sharing.busy_s

    @property
    def lost_tokens(self) -> float:
        """Drawn for requests that were never answered, as it died or they were cancelled."""
        return self._serving.lost_tokens

    # The contract.

    async def generate(self, request: Request) -> Sample:
        """See the protocol; requests wait while it is paused."""
        self._check()
        return await self._serving.answer(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See the protocol."""
        await self._taker()(self.costs.pause_s)
        if self._paused:
            return
        if mode == "wait":
            life, drained = self._lives, self._serving.sharing.taken == 0
            await self._serving.drain()
            self._check(life)
            if not (drained or self._serving.draining):
                raise EngineError(f"engine {self.name} was resumed while it was about to pause")
        self._paused = True
        self._serving.sharing.speed_up(0.0)
        if mode == "abort":
            self._serving.give_back()
        self._serving.undrain()

    async def resume(self) -> None:
        """See the protocol."""
        await self._taker()(self.costs.resume_s)
        if self._updates.dirty:
            raise EngineError(f"engine {self.name} is DIRTY; commit again, or roll back")
        self._paused = False
        self._serving.undrain()
        self._serving.sharing.speed_up(self._factor)

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See the protocol; tensors are not looked at, and buckets are counted."""
        await self._updates.stage(update, buckets)

    async def commit(self, update_id: str) -> int:
        """See the protocol."""
        self._check()
        if not self._paused and update_id != self._updates.committed:
            raise EngineError(f"engine {self.name} is not paused; pause it before {update_id}")
        before = self._updates.committed
        version = await self._updates.commit(update_id)
        if self._updates.committed != before:
            self._serving.stamps.switch(version, at=self._serving.sharing.count)
        return version

    async def rollback(self, update_id: str) -> None:
        """See the protocol."""
        self._check()
        self._updates.rollback(update_id)

    async def health(self) -> EngineHealth:
        """See the protocol."""
        if self._dead:
            return EngineHealth(status="DEAD", version=None, detail=self._dead)
        running = self._serving.taken
        if self._updates.dirty:
            return EngineHealth(
                status="DIRTY", version=None, detail="half committed", running=running
            )
        return EngineHealth(
            status="PAUSED" if self._paused else "SERVING",
            version=self._updates.version,
            running=running,
        )

    async def close(self) -> None:
        """See the protocol."""
        if not self._dead:
            self._serving.give_back()
            self.die("closed")

    # What can happen to it.

    def die(self, why: str = "killed") -> None:
        """Lose everything: requests fail, and nothing is answered."""
        self._dead = f"engine {self.name} does not answer: {why}"
        self._lives += 1
        self._serving.fail(EngineDead(self._dead))

    def come_back(self) -> None:
        """Restarts the engine with the weights that it began with. Alive: no-op."""
        if self._dead:
            self._dead = ""
            self._restart()
            self._serving.undrain()
            self._serving.sharing.speed_up(self._factor)

    def run_at(self, factor: float) -> None:
        """Draw tokens `factor` times as fast as usual; 0 hangs, and health does not show it."""
        self._factor = factor
        if not self._paused:
            self._serving.sharing.speed_up(factor)

    # Within.

    def _check(self, life: int | None = None) -> None:
        if self._dead or (life is not None and life != self._lives):
            raise EngineDead(self._dead or f"engine {self.name} was started again")

    def _taker(self) -> Callable[[float], Awaitable[None]]:
        """Takes seconds of this life of the engine; what began in an earlier one fails."""
        life = self._lives

        async def take(seconds: float) -> None:
            self._check(life)
            if seconds:
                await asyncio.sleep(seconds)
            self._check(life)

        return take

    def _due(self, kind: str) -> bool:
        now = asyncio.get_running_loop().time()
        fault = self._faults.due("engine", now, index=self._index, kinds=(kind,))
        if fault is not None:
            self._back_in_s = fault.for_s
        return fault is not None

    def _die_of_fault(self) -> None:
        self.die("killed by a fault")
        if self._back_in_s:
            asyncio.get_running_loop().call_later(self._back_in_s, self.come_back)
