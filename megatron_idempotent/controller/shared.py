"""The state that the pumps share: versions, the buffer, and the signal of a change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from .buffer import GroupBuffer
from .measure import Measure
from .protocol import Sampler
from .records import Admission
from .samplers import checked_room
from .settings import ControllerSettings
from .watch.metrics import InflightClock


class Shared:
    """State of one run, changed by coroutines of one event loop, so never between two awaits."""

    def __init__(
        self, settings: ControllerSettings, sampler: Sampler, measure: Measure, *, capacity: int
    ) -> None:
        self.settings = settings
        self.sampler = sampler
        self.measure = measure
        self.buffer = GroupBuffer(capacity)
        self.state: Literal["starting", "running", "draining", "ended"] = "starting"
        self.trainer_version = 0
        self.rollout_version = 0
        self.train_steps = 0
        self.published = -1
        """The version that engines were given last; -1 for none of this run."""
        self.permitted = False
        """True if groups may start with the published weights."""
        self.next_prompt = 0
        self.exhausted = False
        self.publish_failed = False
        """True if a publish during a step has failed: its groups will not come."""
        self.engines_back = False
        """True if an engine answers again after all were lost; it needs the weights."""
        self.step_groups = 0
        self.doing = ""
        self.dropped: Counter[str] = Counter()
        """Groups that could not be generated, by reason."""
        self.retries: Counter[str] = Counter()
        self.idle_since = 0.0
        self.sync_metrics: Mapping[str, float] = {}
        """Metrics of the last publish."""
        self.inflight: InflightClock | None = None
        """The number of groups being generated, integrated over time."""
        self._waiting: list[asyncio.Future[None]] = []

    def count_generating(self) -> None:
        """A group was started, or is not being generated any more."""
        generating = self.buffer.counts.generating
        if self.inflight is not None:
            self.inflight.now(self.measure.now(), generating)
        self.measure.count("generating groups", generating)

    def lose(self, group_id: int) -> None:
        """Give up a ready group that the data plane has lost: another takes its place."""
        self.buffer.drop(group_id, "filtered", "lost")
        self.dropped["lost"] += 1
        self.tell()

    def progressed(self) -> None:
        """Something that a run is made of was done: tell all who wait, and the watchdog."""
        self.idle_since = self.measure.now()
        self.tell()

    def tell(self) -> None:
        """Wake all who wait for a change."""
        # Not an Event: that belongs to one event loop, and a run to one each.
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self) -> None:
        """Wait for the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    @property
    def current(self) -> bool:
        """True if engines have the weights of the newest outer step."""
        return self.published >= self.trainer_version - (
            self.trainer_version % self.settings.minibatches
        )

    @property
    def draining(self) -> bool:
        """True if the run is to end as soon as it can."""
        return self.state == "draining"

    def room(self) -> int:
        """Returns how many groups may start now."""
        if not self.permitted or self.state != "running" or self.exhausted:
            return 0
        running = self.buffer.counts.generating
        admission = Admission(
            rollout_version=self.rollout_version,
            trainer_version=self.trainer_version,
            groups_per_step=self.settings.groups_per_step,
            accepted=self.buffer.accepted,
            running=running,
        )
        places = int(min(checked_room(self.sampler, admission), self.buffer.free))
        if self.settings.concurrency:
            places = min(places, self.settings.concurrency - running)
        return max(places, 0)
