"""Decides when checkpoints are written, and resumes from the newest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .clearing import Clearing
from .protocol import DataPlane, Prompts, Store
from .reporting import Reporting
from .saved_state import capture, forget, put_back
from .shared import Shared


class Checkpoints:
    """Example: `if checkpoints.due(version): await checkpoints.capture()`."""

    def __init__(
        self,
        shared: Shared,
        clearing: Clearing,
        plane: DataPlane,
        prompts: Prompts,
        reporting: Reporting,
        store: Store | None,
    ) -> None:
        self._shared = shared
        self._clearing = clearing
        self._plane = plane
        self._prompts = prompts
        self._reporting = reporting
        self.store = store
        self.until = 0
        """The run's last version, which has a checkpoint too."""
        self.unrestored = False
        """True if ranks, or the run, are not in the newest checkpoint's state: `restore` has to
        succeed before anything else."""
        self._captured: Mapping[str, Any] | None = None

    def due(self, version: int) -> bool:
        """Returns whether a version is written."""
        settings = self._shared.settings
        outer, every = version // settings.minibatches, settings.checkpoint_every
        if self.store is None or not every or not outer:
            return False
        return outer % every == 0 or version >= self.until

    @property
    def due_early(self) -> bool:
        """Returns whether a run that ends early is written."""
        shared = self._shared
        out_of_prompts = shared.exhausted and shared.trainer_version < self.until
        return shared.draining or bool(out_of_prompts and shared.settings.checkpoint_every)

    async def capture(self) -> None:
        """Keep the run's state as it is now, for `save`."""
        self._captured = await capture(self._shared, self._plane)

    async def save(self) -> None:
        """Write what was captured, if anything was."""
        state, self._captured = self._captured, None
        if state is None or self.store is None:
            return
        with self._shared.measure.phase("checkpoint", version=state["trainer_version"]):
            self._shared.doing = "checkpoint"
            await self.store.save(state["trainer_version"], state)
            self._shared.progressed()

    async def restore(self, *, starting: bool = False) -> None:
        """Ranks, buffer and place in the prompts as in the newest checkpoint.

        Errors: those of the store, `RanksLost` among them; `ControllerError` for a checkpoint of
            another run. Then `unrestored` stays set.
        """
        assert self.store is not None, "restore() needs a store"
        shared = self._shared
        self.unrestored = True
        with shared.measure.phase("restore"):
            shared.doing = "restore"
            self._captured = None
            state = await self.store.restore()
            await self._clearing.clear([held.id for held in shared.buffer.ready])
            forget(shared)
            if state is not None:
                for group_id in await put_back(shared, self._plane, self._prompts, state):
                    self._clearing.renewed(group_id)
            if not starting:
                shared.retries["restore"] += 1
            self._reporting.begin()
            shared.progressed()
        self.unrestored = False
