"""Several engines as one: each request goes to an engine that serves, and has the fewest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from .errors import EngineDead, EngineError
from .protocol import RolloutEngine
from .records import Request, Sample
from .resubmit import generate_whole


class Quarantine(Protocol):
    """Knows which engines must not be used, by name, and why. `sync.WeightSync` does."""

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Reasons by name."""
        ...


class EnginePool:
    """Sends requests to engines; those of an engine that dies go to the others.

    Example: `sample = await EnginePool(engines, sync=weight_sync).generate(request)`.
    """

    def __init__(self, engines: Sequence[RolloutEngine], *, sync: Quarantine | None = None) -> None:
        if not engines:
            raise ValueError("EnginePool() got no engines; give at least one")
        self._engines = {engine.name: engine for engine in engines}
        self._sync = sync
        self._running: Counter[str] = Counter()
        self._dead: dict[str, str] = {}

    async def generate(self, request: Request) -> Sample:
        """A whole response: what an engine hands back as a part, or loses, the others continue.

        Errors: `EngineError` naming every engine where none is left; `ValueError` of a request that
            can never be answered.
        """
        return await generate_whole(lambda _: cast("RolloutEngine", self._pick()), request)

    async def look_again(self) -> None:
        """Ask engines that were lost whether they are back."""
        lost = [self._engines[name] for name in self._dead]
        for engine, health in zip(
            lost, await asyncio.gather(*(each.health() for each in lost)), strict=True
        ):
            if health.status in ("SERVING", "PAUSED"):
                del self._dead[engine.name]

    def _pick(self) -> _Counted:
        out = {**self._dead, **(self._sync.quarantined if self._sync else {})}
        usable = [engine for name, engine in self._engines.items() if name not in out]
        if not usable:
            raise EngineError(
                f"no engine is left: {'; '.join(f'{name}: {why}' for name, why in out.items())}; "
                "start one of them again"
            )
        least = min(usable, key=lambda engine: self._running[engine.name])
        return _Counted(least, self._running, self._dead)


class _Counted:
    """An engine as `generate_whole` uses it: counted while it runs, and struck off if it dies."""

    def __init__(self, engine: RolloutEngine, running: Counter[str], dead: dict[str, str]) -> None:
        self.name = engine.name
        self._engine, self._running, self._dead = engine, running, dead

    async def generate(self, request: Request) -> Sample:
        self._running[self.name] += 1
        try:
            return await self._engine.generate(request)
        except EngineDead as error:
            self._dead[self.name] = str(error)
            raise
        finally:
            self._running[self.name] -= 1
