"""Deltas: lossless by bits, small, refused where they do not fit, and undone by a delta."""

from __future__ import annotations

import itertools
import math
import re
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.rl.weights import (
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightsError,
    checksum,
    deltas,
    records,
)
from megatron_idempotent.rl.weights.deltas import (
    EncodedDelta,
    Patch,
    apply,
    encode,
    join,
    merged,
    verify,
)
from megatron_idempotent.rl.weights.records import DELTA_HEADER, Part

pytestmark = pytest.mark.full

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
#: Around a word of 8 bytes, and a block that is compared and mixed at once.
LENGTHS = (0, 1, 3, 4, 7, 8, 9, 65, 1000, (1 << 19) + 3)
FRACTIONS = (0.0, 0.0003, 0.02, 0.2, 0.6, 1.0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def two_versions(
    dtype: torch.dtype, length: int, fraction: float, seed: int, *, least: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bits, NaNs and zeros of both signs among them, and how they are later."""
    generator = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    old = generator.integers(0, 256, length * dtype.itemsize, np.uint8).view(unsigned)
    new = old.copy()
    at = generator.random(length) < fraction
    new[at] ^= generator.integers(1, least, int(at.sum()), np.uint64).astype(unsigned)
    return tuple(torch.from_numpy(each.view(np.uint8)).view(dtype) for each in (new, old))  # type: ignore[return-value]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(LENGTHS) | st.integers(0, 300),
    st.sampled_from(FRACTIONS),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_new_bits_come_back_and_old_ones_by_the_undo(
    dtype: torch.dtype, length: int, fraction: float, seed: int, wide: bool
) -> None:
    least = 256 ** (min(dtype.itemsize, 4) if wide else 1)
    new, old = two_versions(dtype, length, fraction, seed, least=least)
    delta = encode(new, old)
    assert delta.elements == length
    assert delta.before == checksum(old)
    assert delta.after == checksum(new)
    tensor = old.clone()
    received = EncodedDelta(delta.data.clone())
    for _ in range(2):  # the second time there is nothing to do
        apply(received, tensor)
        assert torch.equal(bits(tensor), bits(new))
    for _ in range(2):
        apply(received.undo(), tensor)
        assert torch.equal(bits(tensor), bits(old))
    assert torch.equal(received.undo().undo().data, delta.data)


def test_signs_of_zero_and_payloads_of_nan_are_bits_like_others() -> None:
    old = torch.tensor([0.0, -0.0, 1.0, float("nan")])
    new = torch.tensor([-0.0, 0.0, 1.0, 0.0])
    new.view(torch.int32)[3] = 0x7FC12345
    delta = encode(new, old)
    assert delta.changed == 3
    apply(delta, old)
    assert old.view(torch.int32).tolist() == new.view(torch.int32).tolist()


@pytest.mark.parametrize("fraction", [0.0001, 0.001, 0.004, 0.01, 0.03, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("size", "told_bits"), [(1, 1), (255, 9), (32767, 17)])
def test_a_delta_is_little_more_than_what_must_be_told(
    fraction: float, size: int, told_bits: int
) -> None:
    count = 1 << 20
    generator = np.random.default_rng(3)
    old = generator.integers(0, 65536, count, np.uint16)
    by = generator.integers(1, size, count, endpoint=True) * generator.choice([-1, 1], count)
    new = old + np.where(generator.random(count) < fraction, by, 0).astype(np.uint16)
    delta = encode(*(torch.from_numpy(each).view(torch.bfloat16) for each in (new, old)))
    told = delta.changed / count
    # Places at their entropy, or a byte each where neighbours are 3 to 16 elements apart.
    entropy = -sum(each * math.log2(each) for each in (told, 1 - told) if each)
    places = count / 8 * max(entropy, 8 * told if 1 / 16 < told < 1 / 8 else 0)
    assert delta.nbytes <= 1.3 * places + 1.02 * delta.changed * told_bits / 8 + 300


def test_places_that_come_in_clusters_cost_little_more() -> None:
    old = torch.zeros(1000, 1024, dtype=torch.bfloat16)  # an embedding, most rows of which rest
    new = old.clone()
    new[::50] += 1
    delta = encode(new, old)
    assert delta.changed == 20 * 1024
    assert delta.nbytes < 3.4 * delta.changed


@pytest.mark.parametrize("fraction", [0.003, 0.1, 0.3, 1.0])
def test_a_byte_that_changed_is_missing_or_too_many_raises_and_writes_nothing(
    fraction: float,
) -> None:
    new, old = two_versions(torch.bfloat16, 1000, fraction, 1, least=3000)
    sound, tensor = encode(new, old).data, old.clone()
    damaged = [sound[:-1], torch.cat([sound, sound[:1]])]
    for place in range(len(sound)):
        if place in range(21, 29):
            continue  # the checksum of the old tensor, which what is made does not depend on
        damaged.append(sound.clone())
        damaged[-1][place] ^= 0x81
    for data in damaged:
        with pytest.raises((UpdateDamaged, UpdateMismatch), match="delta"):
            apply(EncodedDelta(data), tensor)
    assert torch.equal(bits(tensor), bits(old))


def flipped_bit(old: torch.Tensor) -> torch.Tensor:
    return bits(old).index_fill(0, torch.tensor([700]), 3).view(old.dtype)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda old: old + 1, UpdateRefused, "checksum"),
        (flipped_bit, UpdateRefused, "checksum"),
        (lambda old: old[:-1], UpdateMismatch, "999 elements of 2 bytes"),
        (lambda old: old.float(), UpdateMismatch, "1000 elements of 4 bytes"),
        (lambda old: torch.stack([old, old], 1)[:, 0], UpdateMismatch, r"strides \(2,\)"),
    ],
    ids=["another version", "one flipped bit", "another size", "another type", "not contiguous"],
)
def test_a_tensor_that_it_was_not_made_for_is_refused_and_not_written(
    make: Any, error: type[WeightsError], words: str
) -> None:
    delta = encode(*two_versions(torch.bfloat16, 1000, 0.1, 1))
    tensor = make(two_versions(torch.bfloat16, 1000, 0.1, 1)[1])
    before = tensor.clone()
    with pytest.raises(error, match=words):
        apply(delta, tensor)
    assert torch.equal(bits(tensor), bits(before))


@pytest.mark.parametrize("length", [0, 1, 2, (1 << 19) + 1])
def test_places_are_not_read_out_of_bytes_that_go_on(length: int) -> None:
    delta = encode(*two_versions(torch.bfloat16, length, 1.0, 8))
    assert len(delta.places()[0]) == length
    longer = EncodedDelta(torch.cat((delta.data, torch.zeros(1, dtype=torch.uint8))))
    with pytest.raises(UpdateDamaged, match="send it again"):
        longer.places()


BLOCKS = 16


def dense(blocks: int, **changed: Any) -> EncodedDelta:
    """All of so many blocks change by 1, which takes a bit for each element."""
    old = torch.zeros(blocks << 19, dtype=torch.int16)
    made = encode(old + 1, old, before=0, after=0)
    header = list(made._header)
    for name, value in changed.items():
        header[["magic", "itemsize", "elements", "changed"].index(name)] = value
    struct.pack_into(DELTA_HEADER, made.data.numpy(), 0, *header)
    return made


def peak(function: Callable[[], object]) -> int:
    """The most bytes that a call held at once."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [lambda each: join([each, each]), EncodedDelta.undo])
def test_what_a_delta_takes_while_it_is_joined_or_undone_does_not_grow_with_it(
    make: Callable[[EncodedDelta], EncodedDelta],
) -> None:
    small, large = dense(2), dense(BLOCKS)
    made: list[EncodedDelta] = []
    least = peak(lambda: make(small))
    most = peak(lambda: made.append(make(large)))
    assert most < least + 2 * made[0].nbytes
    at_K, by_K = made[0].places()
    assert len(at_K) == BLOCKS << 19
    assert int(by_K[-1]) == (-1 if make is EncodedDelta.undo else 2)


@pytest.mark.parametrize("told", [{"changed": 1}, {"elements": 1 << 60}])
def test_places_that_the_header_does_not_tell_of_are_not_made(told: dict[str, int]) -> None:
    lying = dense(BLOCKS, **told)

    def refused() -> None:
        with pytest.raises(UpdateDamaged, match="send it again"):
            for _ in lying.blocks():
                pass
        if "changed" in told:  # at the first block, so that nothing was kept
            with pytest.raises(UpdateDamaged, match="1 changes has 524288"):
                lying.places()

    assert peak(refused) < 1 << 25


def test_deltas_of_elements_of_two_sizes_are_not_joined() -> None:
    one = encode(torch.ones(8, dtype=torch.int16), torch.zeros(8, dtype=torch.int16), after=0)
    other = encode(torch.ones(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), before=0)
    with pytest.raises(UpdateDamaged, match=r"8 elements of 4 bytes .* 8 of 2"):
        join([one, other])


def test_what_changed_can_be_read_and_written_later() -> None:
    new, old = two_versions(torch.float32, 5000, 0.01, 4)
    at_K, by_K = encode(new, old).places()
    assert at_K.tolist() == (bits(new) != bits(old)).view(-1, 4).any(1).nonzero().flatten().tolist()
    was_K = old.view(torch.int32).numpy()[at_K]
    assert (was_K + by_K).tolist() == new.view(torch.int32)[at_K].tolist()
    was = old.clone()
    patch = verify(encode(new, old), old)
    assert isinstance(patch, Patch)
    assert torch.equal(bits(old), bits(was))
    assert torch.equal(bits(patch.made()), bits(new))
    back = patch.reverse()
    for each, wanted in ((patch, new), (patch, new), (back, was), (back, was)):
        each.write()
        assert torch.equal(bits(old), bits(wanted))


def test_a_patch_that_were_larger_than_the_tensor_is_the_new_tensor() -> None:
    new, old = two_versions(torch.bfloat16, 5000, 0.25, 4)
    was = old.clone()
    made = verify(encode(new, old), old)
    assert isinstance(made, torch.Tensor)
    assert torch.equal(bits(made), bits(new))
    assert torch.equal(bits(old), bits(was))


def test_a_copy_follows_what_was_encoded_of_it() -> None:
    new, old = two_versions(torch.bfloat16, 300_000, 0.02, 5)
    was = old.clone()
    delta = encode(new, old, write=True)
    assert (delta.before, torch.equal(bits(old), bits(new))) == (checksum(was), True)


@pytest.mark.parametrize(
    ("dim", "ends"), [(0, (0, 300, 1024)), (1, (0, 400, 1024)), (0, (0, 1024))]
)
def test_deltas_of_parts_make_one_whose_checksum_is_that_of_the_tensor(
    dim: int, ends: tuple[int, ...]
) -> None:
    # More than is mixed at once, and parts that end inside of that.
    new, old = (each.view(1024, 1024) for each in two_versions(torch.bfloat16, 1 << 20, 0.02, 6))
    parts = [Part((1024, 1024), dim, start, end - start) for start, end in itertools.pairwise(ends)]
    found = [
        (part, encode(*(each.narrow(*part[1:]).clone() for each in (new, old)), part=part))
        for part in parts
    ]
    after = (new.nbytes + sum(delta.after for _, delta in found)) % 2**64
    assert after == checksum(new)
    apply(merged(found, before=checksum(old), after=after), old)
    assert torch.equal(bits(old), bits(new))


@pytest.mark.parametrize(("dim", "start"), [(0, 1100), (1, 400)])
def test_a_device_finds_and_writes_the_hosts_bits(
    dim: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than it compares, writes and mixes at once, and a part that begins inside of that.
    new, old = (each.view(3072, 4096) for each in two_versions(torch.bfloat16, 3 << 22, 0.02, 7))
    part = Part((3072, 4096), dim, start, new.shape[dim] - start)
    rows = [each.narrow(*part[1:]).clone() for each in (new, old)]

    def found() -> list[Any]:
        tensor = old.clone()
        whole, delta = encode(new, old), encode(*rows, part=part)
        apply(whole, tensor)
        data = [each.data.tolist() for each in (whole, delta)]
        return [*data, checksum(tensor), whole.after, bits(tensor).equal(bits(new))]

    on_the_host = found()
    for module in (deltas, records):
        monkeypatch.setattr(module, "in_host_memory", lambda tensor: False)
    assert found() == on_the_host
    assert on_the_host[-2:] == [checksum(new), True]


def test_a_view_that_begins_inside_a_word_is_written_in_place() -> None:
    whole_new, whole_old = two_versions(torch.bfloat16, 1001, 0.1, 5)
    delta = encode(whole_new[1:], whole_old[1:])
    apply(delta, whole_old[1:])
    assert torch.equal(bits(whole_old)[2:], bits(whole_new)[2:])


@pytest.mark.parametrize(
    "other",
    [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, device="meta")],
)
def test_tensors_that_differ_in_kind_have_no_delta(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"encode\(\) got"):
        encode(torch.zeros(2, 3), other)


def test_deltas_in_a_row_are_joined_into_one_and_a_gap_between_them_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    versions = [torch.randn(37, 11, generator=generator).bfloat16()]
    for _ in range(3):
        chosen = torch.rand(37, 11, generator=generator) < 0.2
        versions.append(torch.where(chosen, versions[-1] * 1.5, versions[-1]))
    steps = [encode(new, old) for old, new in itertools.pairwise(versions)]
    tensor = versions[0].clone()
    apply(join(steps), tensor)
    assert torch.equal(tensor.view(torch.int16), versions[-1].view(torch.int16))
    assert join([steps[0], steps[0].undo()]).changed == 0
    with pytest.raises(UpdateDamaged, match="checksum"):
        join([steps[0], steps[2]])
    with pytest.raises(ValueError, match="no deltas"):
        join([])


@pytest.mark.parametrize("old", [torch.zeros(3, 2).t(), torch.zeros(2, 6)[:, ::2]], ids=str)
def test_an_old_tensor_with_gaps_is_not_written_into_a_copy(old: torch.Tensor) -> None:
    new = torch.ones(2, 3)
    with pytest.raises(ValueError, match=re.escape(f"strides {old.stride()}")):
        encode(new, old, write=True)
    assert encode(new, old).changed == 6
    assert not old.any()
    whole = old.contiguous()
    encode(new, whole, write=True)
    assert torch.equal(whole, new)
