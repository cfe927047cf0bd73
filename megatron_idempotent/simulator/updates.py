"""The weights of a simulated engine: versions, what is staged, and what is half-way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from megatron_idempotent.rollout.errors import EngineError
from megatron_idempotent.weights import Bucket, UpdateDamaged, UpdateRefused, WeightUpdate

from .costs import EngineCosts

Take = Callable[[float], Awaitable[None]]
"""Takes so many seconds of an engine. Errors: `EngineDead` where it dies meanwhile."""

Due = Callable[[str], bool]
"""Returns whether a fault of that kind is to happen now."""


class Updates:
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
