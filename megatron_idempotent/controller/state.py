"""The state that the controller's loops share, and small helpers that all of them use."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from megatron_idempotent.metrics.names import InflightClock
from megatron_idempotent.metrics.timeline import Timeline

from .buffer import GroupBuffer
from .protocol import Admission, DataPlane, Prompts, Sampler, Status
from .samplers import checked_room
from .settings import ControllerSettings


class Measure:
    """Phases of a run. Example: `with measure.phase("policy_training"): …`."""

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @staticmethod
    def now() -> float:
        """The event loop's clock in seconds, which may be a virtual one."""
        return asyncio.get_running_loop().time()

    @contextmanager
    def phase(self, name: str, *, track: str = "train", **args: Any) -> Iterator[None]:
        """Measure a block; one that raises counts too."""
        start = self.now()
        try:
            yield
        finally:
            end = self.now()
            self._seconds[name] += end - start
            self.span(track, name, start, args)

    def span(self, track: str, name: str, start: float, args: Mapping[str, Any]) -> None:
        """Draw what began at `start` and ends now."""
        if self._timeline is not None:
            self._timeline.span(track, name, start, self.now(), args)

    def count(self, name: str, value: float) -> None:
        """Draw a number that changed."""
        if self._timeline is not None:
            self._timeline.count(name, self.now(), value)

    def mark(self, track: str, name: str) -> None:
        """Draw something that happened."""
        if self._timeline is not None:
            self._timeline.mark(track, name, self.now())

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


class RunState:
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


def status_of(shared: RunState, prompts: Prompts) -> Status:
    """Returns the state of a run now."""
    counts = shared.buffer.counts
    fields = {each.name: getattr(counts, each.name) for each in dataclasses.fields(counts)}
    running = shared.state in ("running", "draining")
    return Status(
        state=shared.state,
        trainer_version=shared.trainer_version,
        rollout_version=shared.rollout_version,
        train_steps=shared.train_steps,
        outer_steps=shared.trainer_version // shared.settings.minibatches,
        epoch=prompts.epoch(shared.next_prompt),
        inflight_rollouts=counts.generating,
        rollouts_permitted=shared.room() > 0,
        ready_groups=counts.ready,
        step_groups=shared.step_groups,
        doing=shared.doing,
        idle_s=shared.measure.now() - shared.idle_since if running else 0.0,
        counts={**fields, "running": counts.running},
    )


_T = TypeVar("_T")


async def retry(
    shared: RunState,
    what: str,
    call: Callable[[], Awaitable[_T]],
    *,
    final: tuple[type[Exception], ...] = (),
) -> _T:
    """Repeats an idempotent call within the attempts that a group has; returns its result.

    Failures are counted as retries of `what`. Errors: those of the last attempt; one of `final` at
    once, as trying again would not mend it.
    """
    settings, attempt = shared.settings, 0
    while True:
        try:
            return await call()
        except final:
            raise
        except Exception:
            shared.retries[what] += 1
            attempt += 1
            if attempt == settings.group_attempts:
                raise
        await asyncio.sleep(settings.retry_wait_s * 2 ** (attempt - 1))


_log = logging.getLogger(__name__)


class PendingDeletes:
    """Clears groups, and makes up for what failed. Example: `await clearing.clear([3, 4])`."""

    def __init__(self, shared: RunState, plane: DataPlane) -> None:
        self._shared = shared
        self._plane = plane
        self._owed: set[int] = set()

    async def clear(self, group_ids: Iterable[int]) -> None:
        """Have the data plane forget groups. A failure is nobody's: it is tried again later."""
        self._owed.update(group_ids)
        ids = sorted(self._owed)
        if not ids:
            return
        try:
            await self._plane.clear(ids)
        except Exception as error:  # noqa: BLE001 (a store of others; what it was for is done)
            _log.warning("%d groups are not cleared yet: %r", len(ids), error)
            self._shared.retries["clear"] += 1
        else:
            self._owed.difference_update(ids)

    def owe(self, group_id: int) -> None:
        """A group that may be in the data plane, and that nobody will ask for."""
        self._owed.add(group_id)

    def renewed(self, group_id: int) -> None:
        """Keeps a group from being cleared that was put again under its id after a restore."""
        self._owed.discard(group_id)
