"""Simulates an engine without a model: it takes the time of a real one, and keeps its contract."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    PauseMode,
    Request,
    Sample,
    refuse_out_of_turn,
)
from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, WeightUpdate

from .faults import Faults
from .serving import EngineCosts, Length, SimulatedServing, some_length


@dataclasses.dataclass(slots=True)
class _Weights:
    """Holds the weights of one life of an engine; a call of an earlier life changes none of it."""

    version: int
    dirty: bool = False
    """True while they are a mixture of two versions."""
    committed: str = ""
    """Id of the last update that was committed; "" before the first."""
    staging: str = ""
    """Id of the update whose buckets are being taken."""
    staged: WeightUpdate | None = None


class SimulatedEngine:
    """Implements `RolloutEngine` on a virtual clock, with the time that a real engine would take.

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
            name: the engine's name, unique among the engines.
            costs: the time that its work takes.
            length: returns a response's length in tokens, `math.inf` for one that never ends. What
                it raises, `generate` raises, such as `ValueError` for a request that can never be
                answered.
            tokens_per_entry: the tokens that each entry of a sample stands for.
            faults: the faults that may happen in stage and commit; for others call `die`,
                `come_back` and `run_at`.
            index: the number by which faults name the engine.
            version: the version of the weights that it starts with, and comes back with.
        """
        self.name = name
        self.costs = costs or EngineCosts()
        self._faults = faults or Faults(())
        self._index = index
        self._first_version = version
        self.serving = SimulatedServing(
            self.costs, length or some_length, tokens_per_entry, version
        )
        """Its requests, and the tokens and seconds that were spent on them."""
        self._lives = 0
        self._dead = ""
        self._factor = 1.0
        self._paused = False
        self._weights = _Weights(version)

    # The contract.

    async def generate(self, request: Request) -> Sample:
        """Answer a request in the time that it takes; see `RolloutEngine.generate`."""
        self._check()
        return await self.serving.answer(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop drawing tokens; see `RolloutEngine.pause` for the modes."""
        await self._taker()(self.costs.pause_s)
        if self._paused:
            return
        if mode == "wait":
            life, drained = self._lives, await self.serving.drain()
            self._check(life)
            if not drained:
                raise EngineError(
                    f"engine {self.name} was resumed while it was about to pause; pause it again"
                )
        self._paused = True
        self.serving.speed_up(0.0)
        if mode == "abort":
            self.serving.give_back()
        self.serving.undrain()

    async def resume(self) -> None:
        """Draw tokens again; see `RolloutEngine.resume`. Errors: `EngineError` if it is DIRTY."""
        await self._taker()(self.costs.resume_s)
        if self._weights.dirty:
            raise EngineError(f"engine {self.name} is DIRTY; commit again, or roll back")
        self._paused = False
        self.serving.undrain()
        self.serving.speed_up(self._factor)

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Count an update's buckets, without reading tensors; see `RolloutEngine.stage`."""
        self._check()
        weights, take = self._weights, self._taker()
        if update.id == weights.committed:
            return
        refuse_out_of_turn(
            self.name,
            update,
            least=update.version if weights.dirty else weights.version + 1,
            serving=None if weights.dirty else weights.version,
            staging=weights.staging,
        )
        weights.staging, weights.staged = update.id, None
        expected = 0
        try:
            async for bucket in buckets:
                await take(self.costs.bucket_s)
                if self._due("dies in stage"):
                    await take(0.0)
                if bucket.index != expected or self._due("loses a bucket"):
                    raise UpdateDamaged(
                        f"{self.name}: {update.id} lacks bucket {expected}, found "
                        f"{bucket.index}; stage it again"
                    )
                expected += 1
            await take(0.0)
            weights.staged = update
        finally:
            weights.staging = ""

    async def commit(self, update_id: str) -> int:
        """Switch to the staged update, DIRTY meanwhile; see `RolloutEngine.commit`."""
        self._check()
        weights, take = self._weights, self._taker()
        if update_id == weights.committed:
            return weights.version
        if not self._paused:
            raise EngineError(f"engine {self.name} is not paused; pause it before {update_id}")
        update = weights.staged
        if update is None or update.id != update_id:
            staged = update.id if update is not None else "nothing"
            raise EngineError(
                f"engine {self.name} has not staged {update_id}, but {staged}; stage it first"
            )
        weights.dirty = True
        await take(self.costs.commit_s)
        if self._due("dies in commit"):
            await take(0.0)
        if self._due("stays dirty"):
            raise EngineError(
                f"engine {self.name} failed half-way in {update_id}; commit it again or roll back"
            )
        weights.dirty, weights.staged = False, None
        weights.version, weights.committed = update.version, update_id
        self.serving.switch(update.version)
        return update.version

    async def rollback(self, update_id: str) -> None:
        """Drop an update that is staged or half committed; see `RolloutEngine.rollback`."""
        self._check()
        weights = self._weights
        if weights.staged is not None and weights.staged.id == update_id:
            # The version is still the one before: a commit changes it when it is whole.
            weights.staged, weights.dirty = None, False

    async def health(self) -> EngineHealth:
        """Return the engine's status and version; see `RolloutEngine.health`."""
        if self._dead:
            return EngineHealth(status="DEAD", version=None, detail=self._dead)
        running = self.serving.taken
        if self._weights.dirty:
            return EngineHealth(
                status="DIRTY", version=None, detail="half committed", running=running
            )
        return EngineHealth(
            status="PAUSED" if self._paused else "SERVING",
            version=self._weights.version,
            running=running,
        )

    async def close(self) -> None:
        """Answer all requests with what they have, and be DEAD from now on."""
        if not self._dead:
            self.serving.give_back()
            self.die("closed")

    # What can happen to it.

    def die(self, why: str = "killed") -> None:
        """Fail all requests and calls with `EngineDead` until `come_back`; `why` is its reason."""
        self._dead = f"engine {self.name} does not answer: {why}"
        self._lives += 1
        self.serving.fail(EngineDead(self._dead))

    def come_back(self) -> None:
        """Restart a dead engine with the weights that it began with; does nothing to a live one."""
        if self._dead:
            self._dead = ""
            self._paused = False
            self._weights = _Weights(self._first_version)
            self.serving.restart(self._first_version)
            self.serving.undrain()
            self.serving.speed_up(self._factor)

    def run_at(self, factor: float) -> None:
        """Draw tokens `factor` times as fast as usual; with 0 it hangs, which health hides."""
        self._factor = factor
        if not self._paused:
            self.serving.speed_up(factor)

    # Within.

    def _check(self, life: int | None = None) -> None:
        if self._dead or (life is not None and life != self._lives):
            raise EngineDead(self._dead or f"engine {self.name} was started again")

    def _taker(self) -> Callable[[float], Awaitable[None]]:
        """Return a function that waits for seconds, and fails if the engine has died meanwhile."""
        life = self._lives

        async def take(seconds: float) -> None:
            self._check(life)
            if seconds:
                await asyncio.sleep(seconds)
            self._check(life)

        return take

    def _due(self, kind: str) -> bool:
        """Return whether a fault of a kind is due; die of it if that is what it says."""
        fault = self._faults.due("engine", index=self._index, kinds=(kind,))
        if fault is not None and kind.startswith("dies"):
            self.die("killed by a fault")
            if fault.for_s:
                asyncio.get_running_loop().call_later(fault.for_s, self.come_back)
        return fault is not None
