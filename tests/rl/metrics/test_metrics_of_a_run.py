"""Lag, idle shares, queues and waste, from numbers that a person can add up."""

import pytest

pytest.importorskip("torch")  # the records of the engines are imported with it

from megatron_idempotent.rl.controller.protocol import Counts
from megatron_idempotent.rl.metrics.names import (
    InflightClock,
    counts_metrics,
    idle_metrics,
    staleness_metrics,
)


def test_the_histogram_of_lags_has_the_same_names_in_every_step():
    first, second = staleness_metrics([0, 0, 1, 7]), staleness_metrics([2])
    assert first["train/staleness_mean"] == 2.0
    assert first["train/staleness_max"] == 7.0
    assert {name: value for name, value in first.items() if "fraction" in name} == {
        "train/staleness_fraction/0": 0.5,
        "train/staleness_fraction/1": 0.25,
        "train/staleness_fraction/2": 0.0,
        "train/staleness_fraction/3": 0.0,
        "train/staleness_fraction/4": 0.0,
        "train/staleness_fraction/5_or_more": 0.25,
    }
    assert second.keys() == first.keys()
    assert staleness_metrics([]) == {}


def test_the_trainer_is_idle_while_it_waits_for_groups_and_nothing_else():
    phases = {"exposed_generation": 2.0, "policy_training": 5.0, "sync_weights": 1.0}
    assert idle_metrics(phases, 8.0) == {"timing/train/trainer_idle_ratio": 0.25}
    assert idle_metrics({}, 8.0) == {"timing/train/trainer_idle_ratio": 0.0}
    # A wait that began before the row is no more than all of it.
    assert idle_metrics({"exposed_generation": 9.0}, 8.0)["timing/train/trainer_idle_ratio"] == 1.0
    assert idle_metrics(phases, 0.0) == {}


def test_engines_are_idle_while_no_group_is_being_generated():
    clock = InflightClock(100.0)
    for at_s, running in ((102.0, 1), (103.0, 3), (105.0, 0), (106.0, 2)):
        clock.now(at_s, running)
    generation = clock.take(108.0)
    assert generation == (5.0, 11.0)
    metrics = idle_metrics({}, 8.0, generation=generation)
    assert metrics["timing/train/engine_idle_ratio"] == pytest.approx(3 / 8)
    assert metrics["rollouts/inflight_mean"] == pytest.approx(11 / 8)
    # The two groups are still there in the next stretch, and the seconds before it are not.
    assert clock.take(109.0) == (1.0, 2.0)


def test_every_count_is_a_metric_and_a_lost_group_would_show():
    counts = Counts(submitted=20, trained=8, filtered=3, evicted=1, generating=4, ready=2, leased=2)
    metrics = counts_metrics(counts.by_name())
    assert metrics["rollouts/submitted"] == 20.0
    assert (metrics["rollouts/ready"], metrics["rollouts/generating"]) == (2.0, 4.0)
    assert metrics["rollouts/running"] == 8.0
    assert metrics["rollouts/unaccounted"] == 0.0
    assert metrics["rollouts/wasted_fraction"] == pytest.approx(4 / 12)
    assert (
        counts_metrics(Counts(submitted=3, generating=2).by_name())["rollouts/unaccounted"] == 1.0
    )
    assert counts_metrics(Counts().by_name())["rollouts/wasted_fraction"] == 0.0


def test_what_was_dropped_and_tried_again_is_counted_by_reason():
    metrics = counts_metrics(
        Counts().by_name(), {"no spread": 2, "No  Spread!": 1, "timed out": 4, "…": 1}, {"step": 3}
    )
    assert metrics["rollouts/dropped"] == 8.0
    assert metrics["rollouts/dropped/no_spread"] == 3.0
    assert metrics["rollouts/dropped/timed_out"] == 4.0
    assert metrics["rollouts/dropped/other"] == 1.0
    assert (metrics["rollouts/retries"], metrics["rollouts/retries/step"]) == (3.0, 3.0)
    assert counts_metrics(Counts().by_name())["rollouts/retries"] == 0.0
