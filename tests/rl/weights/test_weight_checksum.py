"""Differences that the checksum tells apart, and those that it ignores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_peers import every_kind_of_tensor

from megatron_idempotent.rl.weights import checksum

#: Around what is mixed at once (words of 8 bytes), and around words.
LENGTHS = [1, 7, 8, 9, 63, 64, 65, *(each + (8 << 16) for each in (-1, 0, 9)), 1 << 20]


def random_bytes(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)


lengths = st.sampled_from(LENGTHS) | st.integers(1, 100)


def another_byte(bytes_N: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    bytes_N[data.draw(st.integers(0, len(bytes_N) - 1))] ^= data.draw(st.integers(1, 255))
    return bytes_N


def another_word(bytes_N: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    words_W = bytes_N[: len(bytes_N) // 8 * 8].view(torch.int64)
    if len(words_W):
        place = data.draw(st.integers(0, len(words_W) - 1))
        words_W[place] ^= data.draw(st.just(-1) | st.integers(-(2**63), 2**63 - 1))
    return bytes_N


def swapped_words(bytes_N: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    words_W = bytes_N[: len(bytes_N) // 8 * 8].view(torch.int64)
    if len(words_W):
        places = st.integers(0, len(words_W) - 1)
        first, second = data.draw(places), data.draw(places)
        words_W[[first, second]] = words_W[[second, first]]
    return bytes_N


def shifted(bytes_N: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    return bytes_N.roll(data.draw(st.integers(1, 20)))


@pytest.mark.parametrize("change", [another_byte, another_word, swapped_words, shifted])
@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(0, 2**32), st.data())
def test_any_change_changes_it(change: Any, length: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bytes(length, seed)
    changed = change(tensor.clone(), data)
    assert (checksum(changed) == checksum(tensor)) is torch.equal(tensor, changed)


def test_whole_blocks_that_change_places_change_it() -> None:
    first, second = random_bytes(8 << 16, 1), random_bytes(8 << 16, 2)
    assert checksum(torch.cat((first, second))) != checksum(torch.cat((second, first)))


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
    assert torch.equal(tensor.detach().contiguous().reshape(-1).view(torch.uint8), bytes_N)
    for shift in (1, 4, 8):  # bytes that do not begin at a word
        moved = torch.cat((torch.full((shift,), 99, dtype=torch.uint8), bytes_N))[shift:]
        assert checksum(moved) == expected


def test_it_is_the_same_in_every_release() -> None:
    # Both ends compute it, and they may have different releases of this library.
    assert checksum(torch.arange(9, dtype=torch.uint8)) == 0x9223ECF9F1F1D695
