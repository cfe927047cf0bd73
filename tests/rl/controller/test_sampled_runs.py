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


@given(samplers, sizes, seeds, some_useless, st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_a_run_with_the_required_capacity_always_goes_on(
    sampler, size, seed, useless, minibatches, concurrency
):
    window = sampler.max_staleness
    minibatches = minibatches if window is None else min(minibatches, window + 1)
    run = SampledRun(
        sampler,
        groups_per_step=size,
        # An outer step's groups, as the settings of a controller require.
        capacity=max(sampler.required_capacity(size), minibatches * size),
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


ALL = [
    StrictSampler(),
    WindowedSampler(1, gated=False, abort_stale=True),
    FirstReadySampler(),
    WindowedSampler(2),
    WindowedSampler(2, order="oldest"),
    InOrderSampler(0),
    InOrderSampler(2),
]


@pytest.mark.parametrize("sampler", ALL, ids=lambda sampler: sampler.name)
def test_groups_that_train_one_by_one_need_fewer_places_than_a_step_has_groups(sampler):
    """A lease frees the place. What is required is what the window lets start ahead."""
    for seed in range(10):
        for capacity in (1, 3):
            SampledRun(sampler, groups_per_step=3, capacity=capacity, seed=seed).steps(STEPS)


@pytest.mark.parametrize("sampler", [WindowedSampler(2), InOrderSampler(2)])
def test_the_required_capacity_holds_all_that_a_sampler_lets_start(sampler):
    for less in (0, 1):
        run = SampledRun(sampler, groups_per_step=2, capacity=6 - less, seed=0)
        while run.room() > 0:
            run.start(look=False)
        # One place less, and it is capacity that stops them, not the sampler.
        assert run.buffer.counts.generating == sampler.required_capacity(2) - less


def in_order_run(seed, *, window, size, useless, minibatches=1, less=0, concurrency=1000):
    sampler = InOrderSampler(window)
    return SampledRun(
        sampler,
        groups_per_step=size,
        capacity=sampler.required_capacity(size) - less,
        seed=seed,
        useless=useless,
        minibatches=minibatches,
        concurrency=concurrency,
    )


@given(st.integers(0, 3), sizes, some_useless, st.data())
@settings(max_examples=60, deadline=None)
def test_in_order_trains_the_same_groups_of_the_same_weights_in_every_run(
    window, size, useless, data
):
    minibatches = data.draw(st.integers(1, window + 1))
    less = data.draw(st.integers(0, window * size))
    found = []
    for _ in range(3):
        run = in_order_run(
            data.draw(seeds),
            window=window,
            size=size,
            useless=useless,
            minibatches=minibatches,
            concurrency=data.draw(st.integers(1, 8)),
            less=less,
        )
        found.append(run.steps(STEPS))
        assert run.worst <= window
    assert found[0] == found[1] == found[2]
    # Nothing starves: every group that is of use trains, in order.
    taken = [group_id for step in found[0] for group_id, _ in step]
    assert taken == [each for each in range(taken[-1] + 1) if each not in useless]


def test_first_ready_has_no_bound_of_staleness_and_strict_has_none_at_all():
    worst = [
        SampledRun(FirstReadySampler(), groups_per_step=1, capacity=6, seed=seed)
        for seed in range(20)
    ]
    for run in worst:
        run.steps(30)
    assert max(run.worst for run in worst) > 6
    strict = SampledRun(StrictSampler(), groups_per_step=2, capacity=9, seed=1)
    strict.steps(30)
    assert strict.worst == 0


def test_groups_beyond_the_window_are_aborted_and_steps_take_those_of_their_window():
    aborted = []
    for seed in range(20):
        run = SampledRun(
            WindowedSampler(1, gated=seed % 2 == 0, abort_stale=True),
            groups_per_step=2,
            capacity=8,
            seed=seed,
        )
        run.steps(20)
        assert run.worst <= 1
        aborted.append(run.buffer.counts.aborted)
    assert min(aborted[1::2]) > 0


def test_a_group_beyond_the_window_is_evicted_and_another_takes_its_place():
    evicted = []
    for seed in range(20):
        run = SampledRun(WindowedSampler(1), groups_per_step=2, capacity=4, seed=seed)
        run.steps(20)
        assert run.worst <= 1
        evicted.append(run.buffer.counts.evicted)
    assert max(evicted) > 0
