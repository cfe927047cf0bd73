"""Bins of a long run's picture, against sums by hand and by brute force."""

import random

import pytest

pytest.importorskip("numpy")

import numpy as np

from megatron_idempotent.rl.metrics.chart import at_once, covered, envelope, innermost, kind
from megatron_idempotent.rl.metrics.timeline import Laid, Span, lay_out


def laid(name, start_s, end_s):
    span = Span(track="train", name=name, start_s=start_s, end_s=end_s)
    return Laid(what=span, start_us=round(start_s * 1e6), end_us=round(end_s * 1e6))


def pieces(lane):
    return {
        name: list(zip(starts.tolist(), ends.tolist(), strict=True))
        for name, (starts, ends) in innermost(lane).items()
    }


def test_time_belongs_to_the_innermost_span():
    (lane,) = lay_out(
        [
            laid("step", 0, 10),
            laid("microbatch", 1, 4),
            laid("log-probs", 2, 3),
            laid("microbatch", 6, 10),
            laid("sync", 12, 13),
        ]
    )
    assert pieces(lane) == {
        "step": [(0, 1), (4, 6)],
        "microbatch": [(1, 2), (3, 4), (6, 10)],
        "log-probs": [(2, 3)],
        "sync": [(12, 13)],
    }
    assert innermost([]) == {}


def test_spans_are_of_a_kind_whatever_their_number():
    assert [kind(name) for name in ("group 17", "group 4", "run/3-12", "policy_training", "7")] == [
        "group",
        "group",
        "run/3",
        "policy_training",
        "7",
    ]


def test_a_bin_is_covered_by_the_share_of_its_seconds():
    starts, ends = np.array([0.5, 2.0, 3.25]), np.array([1.5, 3.0, 3.5])
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert covered(starts, ends, edges).tolist() == [0.5, 0.5, 1.0, 0.25, 0.0]


def test_open_spans_are_counted_from_every_change_on():
    lanes = lay_out([laid("a", 0, 2), laid("b", 1, 4), laid("c", 2, 3), laid("d", 3, 3)])
    times, values = at_once(lanes)
    assert times.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == [1, 2, 2, 1, 0]


def test_an_envelope_holds_every_value_of_its_bin_and_their_mean_over_time():
    times, values = np.array([1.0, 2.5, 4.0]), np.array([2.0, 6.0, 0.0])
    low, mean, high = envelope(times, values, np.array([0.0, 2.0, 3.0, 5.0, 6.0]))
    assert low.tolist() == [2, 2, 0, 0]
    assert high.tolist() == [2, 6, 6, 0]
    assert mean.tolist() == [2.0, 4.0, 3.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_an_envelope_is_that_of_brute_force(seed):
    draw = random.Random(seed)
    times = np.array(sorted(draw.sample(range(1, 64), draw.randint(1, 30))), dtype=float)
    values = np.array([float(draw.randint(-5, 5)) for _ in times])
    edges = np.linspace(0, 64, draw.choice([3, 9, 17]))
    low, mean, high = envelope(times, values, edges)

    def at(moment):
        return values[max(np.searchsorted(times, moment, side="right") - 1, 0)]

    width = int(edges[1] - edges[0])
    for number, start in enumerate(edges[:-1]):
        held = [at(start + second) for second in range(width)]
        assert mean[number] == pytest.approx(sum(held) / width)
        # The value at the right edge may be in either bin.
        assert low[number] in (min(held), min([*held, at(start + width)]))
        assert high[number] in (max(held), max([*held, at(start + width)]))
