"""Several engines as one: each request goes to an engine that serves, and has the fewest."""

from __future__ import annotations

import asyncio
import heapq
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
        """Reasons by name. A new mapping whenever it changes, as it is looked at per request."""
        ...


class EnginePool:
    """Sends requests to engines; those of an engine that dies go to the others.

    Example: `sample = await EnginePool(engines, sync=weight_sync).generate(request)`.
    """

    def __init__(self, engines: Sequence[RolloutEngine], *, sync: Quarantine | None = None) -> None:
        if not engines:
            raise ValueError("EnginePool() got no engines; give at least one")
        self._counted = [_Counted(engine, place, self) for place, engine in enumerate(engines)]
        self._sync = sync
        self._quarantined: Mapping[str, str] = {}
        self._dead: dict[str, str] = {}
        # Engines by what they run, as (running, place). An entry whose number has changed since is
        # dropped when it comes to the top; one that must not be used waits in `_aside`.
        self._queue = [(0, each.place) for each in self._counted]
        self._aside: list[_Counted] = []

    async def generate(self, request: Request) -> Sample:
        """A whole response: what an engine hands back as a part, or loses, the others continue.

        Errors: `EngineError` naming every engine where none is left; `ValueError` of a request that
            can never be answered.
        """
        return await generate_whole(lambda _: cast("RolloutEngine", self._pick()), request)

    @property
    def usable(self) -> bool:
        """True if an engine is left that requests can go to."""
        quarantined = self._sync.quarantined if self._sync else {}
        return any(
            each.name not in self._dead and each.name not in quarantined for each in self._counted
        )

    async def look_again(self) -> None:
        """Ask engines that were lost whether they are back."""
        lost = [each for each in self._counted if each.name in self._dead]
        for each, health in zip(
            lost, await asyncio.gather(*(each.engine.health() for each in lost)), strict=True
        ):
            if health.status in ("SERVING", "PAUSED"):
                self._dead.pop(each.name, None)
        self._take_back()

    def _pick(self) -> _Counted:
        """The engine that runs the fewest requests, and the first of those. O(log engines)."""
        quarantined = self._sync.quarantined if self._sync else self._quarantined
        if quarantined is not self._quarantined:
            self._quarantined = quarantined
            self._take_back()
        while self._queue:
            running, place = self._queue[0]
            least = self._counted[place]
            if running == least.running and not self._out(least):
                return least
            heapq.heappop(self._queue)
            if running == least.running:
                self._aside.append(least)
        out = {**self._dead, **quarantined}
        raise EngineError(
            f"no engine is left: {'; '.join(f'{name}: {why}' for name, why in out.items())}; "
            "start one of them again"
        )

    def _out(self, engine: _Counted) -> bool:
        return engine.name in self._dead or engine.name in self._quarantined

    def _take_back(self) -> None:
        """Asks engines again that were not to be used."""
        aside, self._aside = self._aside, []
        for each in aside:
            self._queue_up(each)

    def _queue_up(self, engine: _Counted) -> None:
        """Its number of requests has changed."""
        heapq.heappush(self._queue, (engine.running, engine.place))
        if len(self._queue) > 4 * len(self._counted) + 16:
            self._aside.clear()
            self._queue = [(each.running, each.place) for each in self._counted]
            heapq.heapify(self._queue)

    def _strike_off(self, engine: _Counted, why: str) -> None:
        self._dead[engine.name] = why


class _Counted:
    """An engine as `generate_whole` uses it: counted while it runs, and struck off if it dies."""

    def __init__(self, engine: RolloutEngine, place: int, pool: EnginePool) -> None:
        self.engine = engine
        self.name = engine.name
        self.place = place
        self.running = 0
        self._pool = pool

    async def generate(self, request: Request) -> Sample:
        self._count(1)
        try:
            return await self.engine.generate(request)
        except EngineDead as error:
            self._pool._strike_off(self, str(error))
            raise
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        self.running += more
        self._pool._queue_up(self)
