"""The versions of weights that are served and staged, and the updates that may come next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import torch

from megatron_idempotent.rollout.errors import EngineError
from megatron_idempotent.weights import Bucket, UpdateRefused, WeightUpdate

from .incoming import Incoming
from .served import ServedWeights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Torn:
    """A commit that failed, and so did putting back what was there before."""

    update_id: str
    version: int | None
    trouble: str


class Updates:
    """Stages, commits and takes back updates of one model's weights.

    `commit` and `rollback` need that no forward is running. An exchange that fails puts back what
    was there; only where that fails too are weights of two versions in the model.
    """

    def __init__(self, weights: ServedWeights, *, name: str, version: int) -> None:
        self.version: int | None = version
        """None where none is served: freed, or torn."""
        self.trouble = ""
        """Why none is served."""
        self._weights = weights
        self._name = name
        self._last = version
        self._arriving: tuple[WeightUpdate, asyncio.Task[None]] | None = None
        self._staged: tuple[WeightUpdate, dict[str, torch.Tensor]] | None = None
        self._committed: WeightUpdate | None = None
        self._torn: _Torn | None = None

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. Given up by `rollback` or `free`, it is refused."""
        if self._committed == update:
            return
        self._refuse(update)
        self._staged = None
        task = asyncio.ensure_future(self._receive(update, buckets))
        self._arriving = (update, task)
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            self._arriving = None
        if task.cancelled():
            raise UpdateRefused(
                f"{self._name} gave up update {update.id} while it was staged: it was rolled back, "
                "or its weights were freed"
            )
        task.result()

    def commit(self, update_id: str) -> int:
        """Serve the staged update; returns its version.

        Errors: `EngineError` for an id that is not staged, or where tensors cannot be exchanged.
        """
        if self._staged is None or self._staged[0].id != update_id:
            has = "nothing" if self._staged is None else f"update {self._staged[0].id}"
            raise EngineError(
                f"{self._name} was to commit update {update_id} and has {has} staged; stage it"
            )
        update, tensors = self._staged
        try:
            self._weights.exchange(tensors)
        except Exception as error:
            raise EngineError(
                f"{self._name} could not commit update {update.id}: {type(error).__name__}: "
                f"{error}; {self._after_failure(update)}"
            ) from error
        self.version, self._last, self.trouble = update.version, update.version, ""
        self._committed, self._staged, self._torn = update, None, None
        return update.version

    def committed(self, update_id: str) -> int | None:
        """The version of the last commit, where this is its id and its weights are served."""
        if self._committed is None or self._committed.id != update_id:
            return None
        return self.version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`. Errors: `EngineError` where weights cannot be restored."""
        await self._give_up(update_id)
        if self._torn is not None and self._torn.update_id == update_id:
            try:
                self._weights.restore()
            except Exception as error:
                raise EngineError(
                    f"{self._name} could not take back update {update_id}: "
                    f"{type(error).__name__}: {error}; it stays DIRTY: stage all weights anew"
                ) from error
            self._put_back(self._torn)
        if self._staged is not None and self._staged[0].id == update_id:
            self._staged = None

    async def free(self, why: str) -> None:
        """Give up all weights, served, staged and arriving."""
        await self._give_up(None)
        self._staged = self._committed = self._torn = None
        self._weights.free()
        self.version, self.trouble = None, why

    def _after_failure(self, update: WeightUpdate) -> str:
        if self._weights.torn:
            before = self._torn or _Torn(
                update_id=update.id, version=self.version, trouble=self.trouble
            )
            self._torn = dataclasses.replace(before, update_id=update.id)
            self.version = None
            self.trouble = (
                f"update {update.id} was committed in part; commit it again or roll it back"
            )
            return self.trouble
        if self._torn is not None:
            self._put_back(self._torn)  # what an earlier attempt had left is back as well
        return "what was there before is back"

    def _put_back(self, torn: _Torn) -> None:
        self.version, self.trouble, self._torn = torn.version, torn.trouble, None

    async def _give_up(self, update_id: str | None) -> None:
        if self._arriving is not None and update_id in (None, self._arriving[0].id):
            task = self._arriving[1]
            task.cancel()
            await asyncio.wait({task})

    async def _receive(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        incoming = Incoming(update, expected=self._weights.expected, device=self._weights.device)
        try:
            async for bucket in buckets:
                await asyncio.to_thread(incoming.add, bucket)
        finally:
            close = getattr(buckets, "aclose", None)
            if close is not None:
                with contextlib.suppress(Exception):  # the update's own error is the one to see
                    await close()
        self._staged = (update, await asyncio.to_thread(self._assembled, incoming))

    def _assembled(self, incoming: Incoming) -> dict[str, torch.Tensor]:
        with incoming.side.complete():
            return self._weights.assemble(incoming.complete())

    def _refuse(self, update: WeightUpdate) -> None:
        if self._arriving is not None:
            raise UpdateRefused(
                f"{self._name} was given update {update.id} while {self._arriving[0].id} is being "
                "staged; wait for that one, or roll it back"
            )
        if self._committed is not None and self._committed.id == update.id:
            raise UpdateRefused(
                f"{self._name} was given update {update.id} of version {update.version} and has "
                f"committed one of that id in version {self._committed.version}; give it another id"
            )
        # Freed weights may come again in the version that they had.
        least = self._last + 1 if self.version is not None else self._last
        if update.version < least:
            raise UpdateRefused(
                f"{self._name} was given update {update.id} of version {update.version} and has "
                f"version {self._last}; send {least} or later"
            )
        if update.base_version is not None and update.base_version != self.version:
            serves = "no version" if self.version is None else f"version {self.version}"
            raise UpdateRefused(
                f"{self._name} was given update {update.id}, which builds on version "
                f"{update.base_version}, and serves {serves}; send all tensors"
            )
