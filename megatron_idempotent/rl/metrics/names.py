"""Metric names, and metrics of staleness, idle time and groups. Does not import torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

REWARD = "train/reward"
HELD_OUT = "evaluation/reward"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
POSITIONS = "train/positions"
"""The number of positions in forward and backward, including prompts and padding."""
RESPONSE_TOKENS = "train/response_tokens"
"""The number of response tokens in the loss."""
STALENESS_MEAN = "train/staleness_mean"
STALENESS_MAX = "train/staleness_max"
STALENESS_FRACTION = "train/staleness_fraction/"
"""A prefix of metric names; the suffix is a lag: `0` to `4` and `5_or_more`."""

TOTAL_S = "timing/train/total_s"
TOKENS_PER_S = "timing/train/tokens_per_s"
EXPOSED_GENERATION = "exposed_generation"
"""The phase in which the trainer only waits for groups."""
TRAINER_IDLE_RATIO = "timing/train/trainer_idle_ratio"
ENGINE_IDLE_RATIO = "timing/train/engine_idle_ratio"

SYNC = "sync/"
"""The prefix of the metrics of a publish."""

ROLLOUTS = "rollouts/"
"""A prefix of metric names; the suffix is a field of `Counts`."""
UNACCOUNTED = "rollouts/unaccounted"
WASTED_FRACTION = "rollouts/wasted_fraction"
INFLIGHT_MEAN = "rollouts/inflight_mean"
DROPPED = "rollouts/dropped"
RETRIES = "rollouts/retries"

# Lags from here on share a metric, so that every row has the same metrics.
_LAST_LAG = 5


def staleness_metrics(lags: Sequence[int]) -> dict[str, float]:
    """Return the mean, maximum and distribution of `lags`, the staleness in versions of each group
    of an optimizer step, as metrics by name.

    The result is empty without groups.

    A lag is the version that a group trained minus the oldest version that sampled any of its
    tokens. The fraction of a lag is groups with that lag / all groups of the step.
    """
    if not lags:
        return {}
    of_lag = Counter(min(lag, _LAST_LAG) for lag in lags)
    fractions = {}
    for lag in range(_LAST_LAG + 1):
        suffix = "_or_more" if lag == _LAST_LAG else ""
        fractions[f"{STALENESS_FRACTION}{lag}{suffix}"] = of_lag[lag] / len(lags)
    return {STALENESS_MEAN: sum(lags) / len(lags), STALENESS_MAX: float(max(lags)), **fractions}


def idle_metrics(
    phases: Mapping[str, float], total_s: float, *, generation: tuple[float, float] | None = None
) -> dict[str, float]:
    """Return as metrics by name the fraction of the period `total_s` in which the trainer waited
    for groups, the fraction in which no group was being generated, and the mean number of groups
    being generated.

    The result is empty if `total_s` is 0.

    Args:
        phases: seconds per phase.
        total_s: the duration in seconds.
        generation: the result of `InflightClock.take`; None without metrics of the engines.

    Returns:
        The trainer's idle ratio, seconds in phase `exposed_generation` / `total_s`. With
        `generation`, also the engines' idle ratio, seconds without a generating group / `total_s`,
        and `rollouts/inflight_mean`, group-seconds / `total_s`, which also shows if only some of
        the engines are idle.
    """
    if total_s <= 0:
        return {}
    idle = {TRAINER_IDLE_RATIO: _share(phases.get(EXPOSED_GENERATION, 0.0), total_s)}
    if generation is not None:
        busy_s, group_s = generation
        idle[ENGINE_IDLE_RATIO] = 1.0 - _share(busy_s, total_s)
        idle[INFLIGHT_MEAN] = group_s / total_s
    return idle


def counts_metrics(
    counts: Mapping[str, int],
    dropped: Mapping[str, int] | None = None,
    retries: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Return as metrics by name: a run's counts of groups, the fraction of ended groups that were
    filtered or evicted, how many groups were dropped after errors, and how many calls were retried.

    `counts` are those of `controller.Counts`, by name. `rollouts/unaccounted` is submitted −
    trained − filtered − evicted − running, and always 0; `rollouts/wasted_fraction` is (filtered +
    evicted) / (trained + filtered + evicted). `dropped` and `retries` have a count per reason;
    their metrics are the sum and each count.
    """
    wasted = counts["filtered"] + counts["evicted"]
    ended = counts["trained"] + wasted
    return {
        **{f"{ROLLOUTS}{name}": float(value) for name, value in counts.items()},
        UNACCOUNTED: float(counts["submitted"] - ended - counts["running"]),
        WASTED_FRACTION: wasted / ended if ended else 0.0,
        **_by_reason(DROPPED, dropped or {}),
        **_by_reason(RETRIES, retries or {}),
    }


class InflightClock:
    """Measures how long groups are being generated, in the event loop's time: the seconds with at
    least one such group, and the seconds summed over groups.

    Example: `clock.now(loop.time(), counts.generating)` at each change.
    """

    def __init__(self, at_s: float) -> None:
        self._at_s, self._running = at_s, 0
        self._busy_s = self._group_s = 0.0

    def now(self, at_s: float, running: int) -> None:
        """Record that `running` groups are being generated from `at_s` on."""
        elapsed_s = at_s - self._at_s
        self._busy_s += elapsed_s if self._running else 0.0
        self._group_s += elapsed_s * self._running
        self._at_s, self._running = at_s, running

    def take(self, at_s: float) -> tuple[float, float]:
        """Return two totals for the time between the last call of `take` and `at_s`, and reset them
        to 0.

        Returns:
            Seconds in which at least one group was being generated, and group-seconds: the seconds
            of generation summed over all groups.
        """
        self.now(at_s, self._running)
        totals = self._busy_s, self._group_s
        self._busy_s = self._group_s = 0.0
        return totals


def _share(part_s: float, total_s: float) -> float:
    # A phase that began before the period counts in full, so the ratio could exceed 1.
    return min(part_s / total_s, 1.0)


def _by_reason(prefix: str, reasons: Mapping[str, int]) -> dict[str, float]:
    metrics = {prefix: float(sum(reasons.values()))}
    for reason, count in reasons.items():
        name = f"{prefix}/{re.sub(r'[^a-z0-9]+', '_', reason.lower()).strip('_')[:40] or 'other'}"
        metrics[name] = metrics.get(name, 0.0) + count
    return metrics
