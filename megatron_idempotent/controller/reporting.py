"""One row of metrics per optimizer step, handed to loggers that must not stop the training."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from .protocol import Logger, Recipe
from .records import RolloutGroup, StepOutcome
from .shared import Shared
from .watch.loggers import Loggers
from .watch.metrics import InflightClock, counts_metrics, idle_metrics, staleness_metrics


class Reporting:
    """Example: `reporting.step(groups, outcome, {"evaluation/reward": 0.5})`."""

    def __init__(self, shared: Shared, recipe: Recipe, loggers: Sequence[Logger] | Loggers) -> None:
        self._shared = shared
        self._recipe = recipe
        self._given: Sequence[Logger] = () if isinstance(loggers, Loggers) else loggers
        self._loggers = loggers if isinstance(loggers, Loggers) else Loggers([])
        self._since: float | None = None

    def open(self) -> None:
        """A run begins: a thread of its own calls the loggers, so that none holds up the loop."""
        if self._given:
            self._loggers = Loggers(self._given, threaded=True, lent=True)

    async def close(self) -> None:
        """The run is over: wait until loggers have all rows. Who gave them closes them."""
        if self._given:
            await asyncio.to_thread(self._loggers.close)
            self._given = self._loggers.working

    def step(
        self,
        groups: Sequence[RolloutGroup],
        outcome: StepOutcome,
        extra: Mapping[str, float],
    ) -> None:
        """The row of the version that a step has made. `extra` has whole names."""
        shared = self._shared
        version = shared.trainer_version
        now = shared.measure.now()
        total_s = now - self._since if self._since is not None else 0.0
        self._since = now
        phases = shared.measure.take()
        generation = shared.inflight.take(now) if shared.inflight is not None else None
        learnt = {**self._recipe.metrics(groups, version - 1), **outcome.metrics}
        lags = [version - 1 - group.oldest_version for group in groups]
        self._loggers.log(
            {
                **{f"train/{name}": value for name, value in learnt.items()},
                "train/response_tokens": float(outcome.tokens),
                "train/optimizer_steps": float(outcome.updated),
                **staleness_metrics(lags),
                **{f"timing/train/{name}_s": seconds for name, seconds in phases.items()},
                "timing/train/total_s": total_s,
                "timing/train/tokens_per_s": outcome.tokens / total_s if total_s else 0.0,
                **idle_metrics(phases, total_s, generation=generation),
                **counts_metrics(shared.buffer.counts, shared.dropped, shared.retries),
                **{f"sync/{name}": value for name, value in shared.sync_metrics.items()},
                **extra,
            },
            step=version,
        )
        for name, value in (("lag", max(lags, default=0)), ("trainer version", version)):
            shared.measure.count(name, value)

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """The row of version 0, which no step has made; none without metrics."""
        if metrics:
            self._loggers.log(metrics, step=0)
        self.begin()

    def begin(self) -> None:
        """Time starts to count for the next row."""
        shared = self._shared
        self._since = now = shared.measure.now()
        shared.measure.take()
        shared.inflight = InflightClock(now)
        shared.count_generating()
