"""Names of the metrics of an asynchronous run that something else looks up. Free of torch."""

from __future__ import annotations

REWARD = "train/reward"
LOSS = "train/loss"
STALENESS_MEAN = "train/staleness_mean"
STALENESS_MAX = "train/staleness_max"
STALENESS_FRACTION = "train/staleness_fraction/"
"""Before a lag, from `0`; the last one is `5_or_more`."""

TOTAL_S = "timing/train/total_s"
TOKENS_PER_S = "timing/train/tokens_per_s"
EXPOSED_GENERATION = "exposed_generation"
"""The phase in which the trainer waits for groups and does nothing else."""
TRAINER_IDLE_RATIO = "timing/train/trainer_idle_ratio"
ENGINE_IDLE_RATIO = "timing/train/engine_idle_ratio"

ROLLOUTS = "rollouts/"
"""Before each of `Counts`, all since the run began or, for queues, now."""
UNACCOUNTED = "rollouts/unaccounted"
WASTED_FRACTION = "rollouts/wasted_fraction"
INFLIGHT_MEAN = "rollouts/inflight_mean"
DROPPED = "rollouts/dropped"
RETRIES = "rollouts/retries"
