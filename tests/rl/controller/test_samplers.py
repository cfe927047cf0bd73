"""Samplers: what they select, what they evict, how many groups they let start."""

from __future__ import annotations

import pytest
from buffer_strategies import contents, filled, versions
from custom_samplers import Answers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.rl.controller.protocol import Admission, Generating, Held, Sampler
from megatron_idempotent.rl.controller.samplers import (
    FirstReadySampler,
    InOrderSampler,
    SamplerError,
    StrictSampler,
    WindowedSampler,
    chosen,
    load_sampler,
)
from megatron_idempotent.rl.metrics.loggers import SettingsError

windows = st.integers(0, 3)
counts = st.integers(0, 6)


KINDS = {
    "freshest": WindowedSampler,
    "oldest": lambda window: WindowedSampler(window, order="oldest"),
    "aborting": lambda window: WindowedSampler(window, abort_stale=True),
    "strict": lambda window: StrictSampler(),
    "first_ready": lambda window: FirstReadySampler(),
    "in_order": InOrderSampler,
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(contents, windows, versions, counts)
def test_a_sampler_selects_evicts_and_aborts_what_its_kind_says(
    kind, groups, window, version, count
):
    ready = filled(groups).ready
    window, sampler = (0 if kind == "strict" else window), KINDS[kind](window)
    in_window = [held for held in ready if 0 <= version - held.version <= window]
    limit = min((each.id for each in ready.generating()), default=100)
    expected = {
        "first_ready": list(ready),
        "in_order": sorted((held for held in ready if held.id < limit), key=lambda held: held.id),
        "oldest": in_window,
    }.get(kind, sorted(in_window, key=lambda held: (version - held.version, held.arrival)))
    found = chosen(sampler, "select", ready, version=version, count=count)
    assert list(found) == expected[:count]

    stale = {held for held in ready if version - held.version > window}
    evicted = chosen(sampler, "evict", ready, version=version)
    assert set(evicted) == (set() if kind in ("first_ready", "in_order") else stale)
    late = {each for each in ready.generating() if version - each.version > window}
    aborted = chosen(sampler, "abort", ready, version=version)
    assert set(aborted) == (late if kind == "aborting" else set())


def test_a_window_without_a_gate_lets_all_start_that_could_train_in_it():
    def admission(trainer_version):
        return Admission(
            rollout_version=2,
            trainer_version=trainer_version,
            groups_per_step=4,
            accepted=1000,
            running=200,
        )

    sampler = WindowedSampler(1, gated=False)
    assert WindowedSampler(1).room(admission(3)) == 0
    assert sampler.room(admission(3)) > 10**6
    assert sampler.room(admission(4)) == 0
    assert sampler.required_capacity(4) == WindowedSampler(1).required_capacity(4)


def test_room_is_what_can_train_within_the_window():
    admission = Admission(
        rollout_version=2, trainer_version=3, groups_per_step=4, accepted=14, running=2
    )
    assert WindowedSampler(1).room(admission) == (1 + 2 + 1) * 4 - 14 - 2
    assert InOrderSampler(3).room(admission) == (3 + 2 + 1) * 4 - 14 - 2
    assert StrictSampler().room(admission) == 0, "never negative"
    assert FirstReadySampler().room(admission) > 10**6


def test_capacity_is_a_steps_groups_for_each_version_of_the_window():
    assert WindowedSampler(2).required_capacity(4) == 12
    assert InOrderSampler(1).required_capacity(4) == 8
    assert StrictSampler().required_capacity(4) == FirstReadySampler().required_capacity(4) == 4


def test_samplers_are_loaded_by_name_or_by_path():
    windowed: Sampler = load_sampler("windowed", max_staleness=2, order="oldest")
    assert (type(windowed), windowed.max_staleness) == (WindowedSampler, 2)
    assert (windowed.name, windowed.drains) == ("windowed", False)
    strict = load_sampler("strict")
    assert (type(strict), strict.max_staleness, strict.name) == (StrictSampler, 0, "strict")
    first = load_sampler("first_ready")
    assert (first.name, first.max_staleness, first.drains) == ("first_ready", None, False)
    in_order = load_sampler("in_order", lookahead=3)
    assert (in_order.name, in_order.max_staleness, in_order.drains) == ("in_order", 3, True)
    custom = load_sampler("custom_samplers:NewestIds", shift=2)
    assert (custom.name, custom.places, custom.shift) == ("newest_ids", 3, 2)
    buffer = filled([(0, 0), (4, 0), (1, 0)])
    assert [held.id for held in chosen(custom, "select", buffer.ready, version=0, count=2)] == [
        4,
        1,
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("newest", {}, "sampler is 'newest'; allowed: first_ready, in_order, strict, windowed, or"),
        (":NewestIds", {}, "allowed: first_ready, in_order, strict, windowed, or package.module:C"),
        ("nowhere:Sampler", {}, "^sampler is 'nowhere:Sampler'"),
        ("custom_samplers:Nobody", {}, "^sampler is 'custom_samplers:Nobody'"),
        ("custom_samplers:not_a_class", {}, "^sampler is 'custom_samplers:not_a_class'"),
        ("windowed", {"max_staleness": 2, "size": 1}, "'size'; its options: max_staleness: "),
        ("windowed", {}, "missing a required argument: 'max_staleness'; its options: max_stal"),
        ("strict", {"max_staleness": 1}, "sampler strict: .* its options: gated: "),
        ("windowed", {"max_staleness": -1}, "max_staleness is -1; allowed: 0 or more versions"),
        ("windowed", {"max_staleness": True}, "max_staleness is True; allowed"),
        ("windowed", {"max_staleness": 1, "gated": 1}, "gated is 1; allowed: true or false"),
        ("strict", {"abort_stale": "no"}, "abort_stale is 'no'; allowed: true or false"),
        ("in_order", {"lookahead": 1.5}, r"lookahead is 1\.5; allowed: 0 or more"),
        ("windowed", {"max_staleness": 1, "order": "best"}, "allowed: freshest, oldest"),
        ("custom_samplers:NewestIds", {"size": 1}, "'size'; its options: places=3, shift=0"),
        ("custom_samplers:Half", {}, "has no drains, required_capacity, evict, room"),
        ("custom_samplers:NoName", {}, "has name ''; allowed: a string"),
        ("custom_samplers:BelowZero", {}, "max_staleness -1; allowed: 0 or more versions, or None"),
        ("custom_samplers:Perhaps", {}, "has drains 'no'; allowed: a bool"),
    ],
)
def test_what_is_no_sampler_is_told_what_is_known(name, options, message):
    with pytest.raises(SettingsError, match=message):
        load_sampler(name, **options)


KNOWN, OTHER = (Held(id=n, arrival=n, version=0) for n in (0, 1))
RUNNING = Generating(id=2, started=2, version=2)


@pytest.mark.parametrize("method", ["select", "evict", "abort"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Held(id=7, arrival=7, version=0)], r"Held\(id=7, .*, which is not"),
        ([Held(id=0, arrival=0, version=3)], r".*version=3\), which is not"),
        ([Generating(id=2, started=2, version=1)], r".*version=1\), which is not"),
        ([Held(id=3, arrival=2, version=0)], r".*id=3, .*, which is not"),
        ([0], "0, which is not"),
        ([[]], r"\[\], which is not"),
        ("twice", r"group \d twice; return each once"),
        (None, "a NoneType; return the groups, or an empty list"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_sampler(method, answer, message):
    buffer = filled([(0, 0), (1, 0), (2, None), (3, 0)])
    buffer.lease([3])  # it is in the open step, and not ready
    twice = [RUNNING if method == "abort" else KNOWN] * 2
    sampler = Answers(twice if answer == "twice" else answer)
    with pytest.raises(SamplerError, match=f"sampler answers: {method} returned {message}") as told:
        chosen(
            sampler, method, buffer.ready, version=0, **{"count": 5} if method == "select" else {}
        )
    among = "being generated" if method == "abort" else "among the 2 ready groups"
    assert among in str(told.value) or "which" not in message


def test_right_answers_are_taken_but_not_more_than_were_asked_for():
    ready, sampler = filled([(0, 0), (1, 0), (2, None)]).ready, Answers([KNOWN, OTHER])
    for named in ({"count": 2}, {"count": 3}):
        assert chosen(sampler, "select", ready, version=0, **named) == (KNOWN, OTHER)
    with pytest.raises(SamplerError, match="sampler answers: select returned 2 groups of 1 that"):
        chosen(sampler, "select", ready, version=0, count=1)
    assert chosen(sampler, "evict", ready, version=0) == (KNOWN, OTHER)
    assert chosen(Answers([RUNNING]), "abort", ready, version=0) == (RUNNING,)
