"""Rows of a batch become packs of at most so many tokens, in bins that are few and alike."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.fp8 import TokenAlignment
from megatron_idempotent.step import bin_sequences, pack_batches

T = 9


def batch_of(lengths: list[int], left: bool) -> dict[str, Any]:
    """Rows with something of each kind in it, padded on either side."""
    n = len(lengths)
    place = torch.arange(T)[None]
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    real_BT = place >= T - lengths_B[:, None] if left else place < lengths_B[:, None]
    return {
        "input_ids": torch.arange(n * T).view(n, T),
        "labels": torch.arange(n * T).view(n, T) + 1,
        "routes": torch.arange(n * T * 2).view(n, T, 2),
        "advantages": torch.arange(n) + 0.5,
        "prompts": [f"prompt {row}" for row in range(n)],
        "temperature": 0.7,
        "attention_mask": real_BT.int(),
    }


@given(
    st.lists(st.integers(0, T), max_size=12),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 8), (4, 4)]),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_each_token_of_each_row_is_in_one_pack_with_all_that_belongs_to_it(
    lengths, left, multiples, multiple
):
    batch = batch_of(lengths, left)
    alignment = TokenAlignment(sequence=multiples[0], pack=multiples[1])
    packs = pack_batches(batch, 24, alignment=alignment, multiple=multiple)
    assert len(packs) % multiple == 0
    seen = []
    for each in packs:
        pack = each["pack"]
        assert pack.tokens <= 24
        assert set(each) == (set(batch) - {"attention_mask"}) | {
            "pack",
            "position_ids",
            "token_mask",
        }
        assert each["temperature"] == 0.7
        for name in ("input_ids", "labels", "routes", "token_mask", "position_ids"):
            assert each[name].shape[:2] == (1, pack.tokens)
        assert (each["input_ids"][0][~pack.mask] == 0).all()
        assert (each["labels"][0][~pack.mask] == -100).all()
        assert torch.equal(each["token_mask"][0] > 0, pack.mask)
        assert torch.equal(each["position_ids"][0], pack.position_ids)
        parts = {name: pack.split(each[name]) for name in ("input_ids", "labels", "routes")}
        for number, length in enumerate(pack.lengths):
            row = int(each["advantages"][number] - 0.5)
            assert each["prompts"][number] == f"prompt {row}"
            assert length == lengths[row]
            seen.append(row)
            real = batch["attention_mask"][row] > 0
            for name, part in parts.items():
                assert torch.equal(part[number], batch[name][row][real])
    assert sorted(seen) == list(range(len(lengths)))


def test_lengths_say_the_same_as_a_mask_and_as_nested_rows():
    lengths = [5, 9, 1, 3]
    batch = batch_of(lengths, left=False)
    by_mask = pack_batches(batch, 12)
    del batch["attention_mask"]
    nested = {
        **{name: batch[name] for name in ("advantages", "prompts", "temperature")},
        **{
            name: torch.nested.nested_tensor(
                [row[:length] for row, length in zip(batch[name], lengths, strict=True)],
                layout=torch.jagged,
            )
            for name in ("input_ids", "labels", "routes")
        },
    }
    for other in (
        {**batch, "lengths": torch.tensor(lengths)},
        {**batch, "lengths": lengths},
        nested,
    ):
        packs = pack_batches(other, 12)
        assert len(packs) == len(by_mask)
        for each, want in zip(packs, by_mask, strict=True):
            for name in ("input_ids", "labels", "routes", "advantages", "position_ids"):
                assert torch.equal(each[name], want[name]), name
            assert each["prompts"] == want["prompts"]


def test_what_rows_share_stays_whole_and_what_is_given_is_kept():
    batch = batch_of([5, 9], left=False)
    batch["table"] = torch.ones(7)
    batch["position_ids"] = torch.arange(T).expand(2, T) + 100
    batch["token_mask"] = torch.ones(2, T)
    (each,) = pack_batches(batch, 20, shared=("table",))
    assert each["table"] is batch["table"]
    assert each["position_ids"].tolist() == [[*range(100, 105), *range(100, 109)]]
    assert each["token_mask"].tolist() == [[1.0] * 14]


def test_packs_without_sequences_are_of_padding_alone():
    packs = pack_batches(batch_of([5], left=False), 16, bins=2, multiple=2)
    assert [each["pack"].lengths for each in packs] == [(5,), ()]
    empty = packs[1]
    assert empty["pack"].tokens == 1
    assert not empty["token_mask"].any()
    assert empty["advantages"].shape == (0,)
    assert pack_batches(batch_of([], left=False), 16) == []


def holes() -> torch.Tensor:
    mask = torch.ones(2, T)
    mask[1, 3] = 0
    return mask


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"attention_mask": None}, "not how many are real"),
        (
            {"attention_mask": torch.ones(2, T - 1)},
            "a tensor of shape (2, 8), for 'input_ids' of (2, 9)",
        ),
        (
            {"attention_mask": torch.ones(2, 1, T, T)},
            "'attention_mask', a tensor of shape (2, 1, 9, 9)",
        ),
        ({"attention_mask": holes()}, "8 tokens in row 1, between places 0 and 8"),
        ({"lengths": torch.tensor([5, 8])}, "row 1 with 'lengths' 8 and 9 tokens"),
        ({"lengths": torch.tensor([5, 10])}, "row 1 with 'lengths' 10: give an int from 0 to 9"),
        ({"lengths": torch.tensor([-1, 9])}, "row 0 with 'lengths' -1"),
        ({"lengths": torch.tensor([5.0, 9.0])}, "'lengths' of torch.float32"),
        ({"token_mask": torch.ones(2, T + 1)}, "'token_mask' has shape (2, 10): give it (2, 9)"),
        ({"pack": 1}, "'pack' in a batch of rows"),
    ],
)
def test_rows_whose_lengths_do_not_fit_are_named(changed, text):
    batch = batch_of([5, 9], left=False) | changed
    batch = {name: value for name, value in batch.items() if value is not None}
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        pack_batches(batch, 20)
    assert text in str(told.value)


def test_a_row_above_the_budget_is_named_with_both_numbers():
    alignment = TokenAlignment(sequence=4, pack=8)
    with pytest.raises(ValueError, match=r"2 rows, of which sequence 1 has 9 tokens, 12 with"):
        pack_batches(batch_of([5, 9], left=False), 10, alignment=alignment)
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)
    with pytest.raises(ValueError, match="'other' with 5 entries in row 1, which has 4 tokens"):
        pack_batches({"input_ids": nested, "other": other}, 10)


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
