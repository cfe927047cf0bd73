"""Whole runs of a buffer and a sampler: they always go on, and stay within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_run import SampledRun

from megatron_idempotent.rl.controller.samplers import (
    FirstReadySampler,
    InOrderSampler,
    StrictSampler,
    WindowedSampler,
)

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 4)
some_useless = st.frozensets(st.integers(0, 60), max_size=25)
samplers = st.one_of(
    st.builds(
        WindowedSampler,
        st.integers(0, 3),
        st.sampled_from(["freshest", "oldest"]),
        gated=st.booleans(),
        abort_stale=st.booleans(),
    ),
    st.builds(StrictSampler, gated=st.booleans(), abort_stale=st.booleans()),
    st.builds(FirstReadySampler),
    st.builds(InOrderSampler, st.integers(0, 3)),
)
STEPS = 8


@given(samplers, sizes, seeds, some_useless, st.integers(1, 4), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_a_run_with_the_required_capacity_always_goes_on(
    sampler, size, seed, useless, minibatches, concurrency, data
):
    window = sampler.max_staleness
    minibatches = minibatches if window is None else min(minibatches, window + 1)
    # An outer step's groups, as the settings of a controller require.
    capacity = max(sampler.required_capacity(size), minibatches * size)
    # Groups that train one by one need fewer: a lease frees the place.
    less = data.draw(st.integers(0, capacity - 1)) if minibatches == 1 else 0
    run = SampledRun(
        sampler,
        groups_per_step=size,
        capacity=capacity - less,
        seed=seed,
        minibatches=minibatches,
        concurrency=concurrency,
        useless=useless,
    )
    steps = run.steps(STEPS)
    assert window is None or run.worst <= window
    taken = [group_id for step in steps for group_id, _ in step]
    assert len(set(taken)) == len(taken) == STEPS * size
    assert not useless & set(taken)


@pytest.mark.parametrize("sampler", [WindowedSampler(2), InOrderSampler(2)])
def test_the_required_capacity_holds_all_that_a_sampler_lets_start(sampler):
    for less in (0, 1):
        run = SampledRun(sampler, groups_per_step=2, capacity=6 - less, seed=0)
        while run.room() > 0:
            run.start(look=False)
        # One place less, and it is capacity that stops them, not the sampler.
        assert run.buffer.counts.generating == sampler.required_capacity(2) - less


@given(st.integers(0, 3), sizes, some_useless, st.data())
@settings(max_examples=60, deadline=None)
def test_in_order_trains_the_same_groups_of_the_same_weights_in_every_run(
    window, size, useless, data
):
    minibatches = data.draw(st.integers(1, window + 1))
    less = data.draw(st.integers(0, window * size))
    found = []
    sampler = InOrderSampler(window)
    for _ in range(3):
        run = SampledRun(
            sampler,
            groups_per_step=size,
            capacity=sampler.required_capacity(size) - less,
            seed=data.draw(seeds),
            useless=useless,
            minibatches=minibatches,
            concurrency=data.draw(st.integers(1, 8)),
        )
        found.append(run.steps(STEPS))
        assert run.worst <= window
    assert found[0] == found[1] == found[2]
    # Nothing starves: every group that is of use trains, in order.
    taken = [group_id for step in found[0] for group_id, _ in step]
    assert taken == [each for each in range(taken[-1] + 1) if each not in useless]


@pytest.mark.parametrize(
    ("make", "size", "capacity", "worst", "given_up"),
    [
        (lambda seed: FirstReadySampler(), 1, 6, range(7, 1000), ""),
        (lambda seed: StrictSampler(), 2, 9, range(1), ""),
        (lambda seed: WindowedSampler(1), 2, 4, range(2), "evicted"),
        (lambda seed: WindowedSampler(1, gated=seed < 10, abort_stale=True), 2, 8, [1], "aborted"),
    ],
    ids=["first_ready", "strict", "windowed", "aborting"],
)
def test_bounds_are_reached_and_what_is_beyond_them_is_given_up(
    make, size, capacity, worst, given_up
):
    runs = []
    for seed in range(20):
        runs.append(SampledRun(make(seed), groups_per_step=size, capacity=capacity, seed=seed))
        runs[-1].steps(25)
    assert max(run.worst for run in runs) in worst
    counts = [getattr(run.buffer.counts, given_up or "evicted") for run in runs]
    assert (max(counts) > 0) == bool(given_up)
    if given_up == "aborted":
        assert min(counts[10:]) > 0
