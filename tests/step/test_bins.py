"""Bins of sequences: within the budget, few, alike, and the same everywhere."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.fp8 import TokenAlignment
from megatron_idempotent.step import bin_sequences

PLAIN = TokenAlignment(sequence=1, pack=1)


@st.composite
def alignments(draw: st.DrawFn) -> TokenAlignment:
    sequence = draw(st.sampled_from([1, 2, 8]))
    return TokenAlignment(sequence=sequence, pack=sequence * draw(st.sampled_from([1, 2, 4])))


@given(
    st.lists(st.integers(0, 96), max_size=40),
    alignments(),
    st.integers(0, 6),
    st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_each_sequence_is_in_one_bin_and_no_bin_is_above_the_budget(
    lengths, alignment, least, multiple
):
    found = bin_sequences(lengths, 100, alignment=alignment, bins=least, multiple=multiple)
    assert sorted(index for each in found for index in each) == list(range(len(lengths)))
    loads = [alignment.of_pack([lengths[index] for index in each]) for each in found]
    assert max([0, *loads]) <= 100
    assert len(found) % multiple == 0
    assert len(found) >= (least if least > 1 or lengths else 0)
    # The fullest first, and in a bin as they came.
    tokens = [sum(alignment.of_sequence(lengths[index]) for index in each) for each in found]
    assert tokens == sorted(tokens, reverse=True)
    assert all(list(each) == sorted(each) for each in found)
    assert bin_sequences(
        list(lengths), 100, alignment=alignment, bins=least, multiple=multiple
    ) == (found)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_two_bins_could_be_one(lengths):
    found = bin_sequences(lengths, 100)
    loads = sorted(sum(lengths[index] for index in each) for each in found)
    assert len(loads) == 1 or loads[0] + loads[1] > 100 or len(loads) == -(-sum(lengths) // 100)


def log_normal(seed: int, number: int, budget: int) -> list[int]:
    """Lengths with a mean of an eighth of the budget and sigma 1, none above it."""
    draw = random.Random(seed)
    location = math.log(budget / 8) - 0.5
    return [max(1, min(budget, int(draw.lognormvariate(location, 1)))) for _ in range(number)]


@pytest.mark.parametrize("seed", range(10))
def test_bins_of_log_normal_lengths_are_full_and_alike(seed):
    lengths = log_normal(seed, 256, 8192)
    found = bin_sequences(lengths, 8192)
    loads = [sum(lengths[index] for index in each) for each in found]
    # No fewer bins can hold them, so that what is unused is less than one bin.
    assert len(found) == -(-sum(lengths) // 8192)
    assert 1 - sum(loads) / (len(loads) * max(loads)) <= 0.05


def test_bins_may_have_even_work_instead_of_even_tokens():
    attention = 1 / 24576

    def waiting(weight: float) -> float:
        """The part of their time that eight ranks, which take turns, wait for the slowest."""
        longest = total = 0.0
        for seed in range(10):
            lengths = log_normal(seed, 512, 8192)
            bins = bin_sequences(lengths, 8192, multiple=8, attention=weight)
            assert len(bins) == len(bin_sequences(lengths, 8192, multiple=8))
            work = [
                sum(lengths[index] * (1 + attention * lengths[index]) for index in each)
                for each in bins
            ]
            longest += 8 * sum(max(work[turn : turn + 8]) for turn in range(0, len(work), 8))
            total += sum(work)
        return 1 - total / longest

    assert waiting(attention) < 0.5 * waiting(0.0)


def test_many_sequences_take_no_time_that_anybody_sees():
    # Two thirds of a budget each: as many bins as sequences, where their sum asks for fewer.
    found = bin_sequences([67] * 5000, 100)
    assert len(found) == 5000


@pytest.mark.parametrize(
    ("lengths", "budget", "options", "text"),
    [
        ([5, 101], 100, {}, "sequence 1 has 101 tokens and a bin at most 100"),
        (
            [5, 97],
            100,
            {"alignment": TokenAlignment(sequence=4, pack=64)},
            "sequence 1 has 97 tokens, 100 with its padding, and a bin at most 100, of which 64",
        ),
        ([5], 100, {"alignment": TokenAlignment(sequence=4, pack=128)}, "multiples of 128"),
        ([5, -1], 100, {}, "sequence 1 has length -1"),
        ([5], 0, {}, "max_tokens, got 0"),
        ([5], 10, {"multiple": 0}, "multiple, got 0"),
        ([5], 10, {"bins": -1}, "bins, got -1"),
    ],
)
def test_what_cannot_be_binned_is_named(lengths, budget, options, text):
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        bin_sequences(lengths, budget, **options)
    assert text in str(told.value)
