"""Differences that the checksum tells apart, and those that it ignores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from weight_peers import every_kind_of_tensor

from megatron_idempotent.rl.weights import checksum

#: Around what is mixed at once (words of 8 bytes), and around words.
LENGTHS = [1, 7, 8, 9, 63, 64, 65, 8 * (1 << 16) - 1, 8 * (1 << 16), 8 * (1 << 16) + 9, 1 << 20]


def random_bytes(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)


lengths = st.sampled_from(LENGTHS) | st.integers(1, 100)
seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=40)
@given(lengths, seeds, st.data())
def test_any_changed_byte_changes_it(length: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bytes(length, seed)
    before = checksum(tensor)
    place = data.draw(st.integers(0, length - 1))
    tensor[place] ^= data.draw(st.integers(1, 255))
    assert checksum(tensor) != before


@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(1, 50), st.integers(0, 49), st.integers(-(2**63), 2**63 - 1))
@example(0, 10, 3, -1)
def test_any_changed_word_changes_it(seed: int, count: int, place: int, change: int) -> None:
    assume(change != 0)
    tensor = random_bytes(8 * count, seed).view(torch.int64)
    before = checksum(tensor)
    tensor[place % count] ^= change
    assert checksum(tensor) != before


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([16, 64, 8 * (1 << 16) + 16, 1 << 20]), seeds, st.data())
def test_two_different_words_that_change_places_change_it(
    length: int, seed: int, data: st.DataObject
) -> None:
    tensor = random_bytes(length, seed).view(torch.int64)
    places = st.integers(0, len(tensor) - 1)
    first, second = data.draw(places), data.draw(places)
    assume(tensor[first] != tensor[second])
    before = checksum(tensor)
    tensor[[first, second]] = tensor[[second, first]]
    assert checksum(tensor) != before


def test_whole_blocks_that_change_places_change_it() -> None:
    first, second = random_bytes(1 << 19, 1), random_bytes(1 << 19, 2)
    assert checksum(torch.cat((first, second))) != checksum(torch.cat((second, first)))


@settings(deadline=None, max_examples=40)
@given(lengths, seeds, st.integers(1, 20))
def test_bytes_that_are_shifted_change_it(length: int, seed: int, by: int) -> None:
    tensor = random_bytes(length, seed)
    shifted = tensor.roll(by)
    assume(not torch.equal(tensor, shifted))
    assert checksum(shifted) != checksum(tensor)


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(0, 20))
def test_zeros_count_by_their_number(length: int, more: int) -> None:
    same = checksum(torch.zeros(length)) == checksum(torch.zeros(length + more))
    assert same == (more == 0)


@pytest.mark.parametrize("name", sorted(every_kind_of_tensor()))
def test_it_depends_on_the_bytes_alone(name: str) -> None:
    tensor = every_kind_of_tensor()[name]
    flat = tensor.detach().contiguous().reshape(-1)
    bytes_N = flat.view(torch.uint8).clone()
    expected = checksum(tensor)
    assert expected == checksum(flat) == checksum(bytes_N)
    assert 0 <= expected < 2**64
    for shift in (1, 4, 8):  # bytes that do not begin at a word
        moved = torch.cat((torch.full((shift,), 99, dtype=torch.uint8), bytes_N))[shift:]
        assert checksum(moved) == expected


def test_it_is_the_same_in_every_release() -> None:
    # Both ends compute it, and they may have different releases of this library.
    assert checksum(torch.arange(9, dtype=torch.uint8)) == 0x934AD1C3C12F1CCA


def test_the_tensor_is_not_changed() -> None:
    tensor = random_bytes(1000, 3)
    before = tensor.clone()
    checksum(tensor)
    assert torch.equal(tensor, before)
