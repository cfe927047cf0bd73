"""Packs against a loop over their tokens, and in the functions that read them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.fp8.packing import Pack, TokenAlignment
from megatron_idempotent.logprobs import shift_targets

pytestmark = pytest.mark.full

PAD, IGNORED = -7, -100


@st.composite
def alignments(draw: st.DrawFn) -> TokenAlignment:
    sequence = draw(st.sampled_from([1, 2, 4, 6]))
    return TokenAlignment(sequence=sequence, pack=sequence * draw(st.sampled_from([1, 3, 16])))


LENGTHS = st.lists(st.integers(0, 9), max_size=5)


@given(LENGTHS, alignments(), st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_a_pack_is_what_a_loop_over_tokens_makes(lengths, alignment, more):
    sequences = [torch.arange(length) + 100 * n for n, length in enumerate(lengths)]
    tokens: list[int] = []
    positions: list[int] = []
    ends = [0]
    for sequence in sequences:
        padding = -len(sequence) % alignment.sequence
        tokens += [*sequence.tolist(), *[PAD] * padding]
        positions += range(len(sequence) + padding)
        ends.append(len(tokens))
    needed = len(tokens) + -len(tokens) % alignment.pack
    total = needed + more * alignment.pack
    if total > len(tokens):
        positions += range(total - len(tokens))
        tokens += [PAD] * (total - len(tokens))
        ends.append(total)

    pack = Pack.of(lengths, alignment, tokens=total if more else None)
    assert alignment.of_pack(lengths) == needed
    flat = torch.cat(sequences) if sequences else torch.empty(0, dtype=torch.int64)
    assert pack.join(flat, fill=PAD).tolist() == tokens
    assert pack.position_ids.tolist() == positions
    assert pack.cu_seqlens.tolist() == ends
    assert pack.cu_seqlens.dtype == torch.int32
    assert pack.mask.tolist() == [token != PAD for token in tokens]
    assert (pack.tokens, pack.max_seqlen) == (total, max([0, *torch.tensor(ends).diff().tolist()]))
    if sequences:
        again = pack.split(pack.join(sequences, fill=PAD))
        assert all(torch.equal(*pair) for pair in zip(again, sequences, strict=True))


@given(LENGTHS, alignments())
@settings(max_examples=100, deadline=None)
def test_targets_of_padding_and_of_last_tokens_are_ignored(lengths, alignment):
    pack = Pack.of(lengths, alignment)
    tokens = pack.join(torch.arange(sum(lengths)), fill=PAD)
    targets = shift_targets(tokens, mask=pack.mask, cu_seqlens=pack.cu_seqlens)
    assert (targets[~pack.mask] == IGNORED).all()
    expected, start = [], 0
    for length in lengths:
        expected += [*range(start + 1, start + length), IGNORED][:length]
        start += length
    assert targets[pack.mask].tolist() == expected


@given(LENGTHS, alignments(), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_sums_are_those_of_each_sequence_in_its_order(lengths, alignment, seed):
    pack = Pack.of(lengths, alignment)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(pack.tokens, 2, generator=generator)
    values[~pack.mask] = torch.nan  # padding takes no part, whatever it holds
    values.requires_grad_()
    sums = pack.sums(values)
    # One addition after the other, in float64: what a loop does.
    expected = []
    for part in pack.split(values.detach()):
        total = torch.zeros(2, dtype=torch.float64)
        for token in part:
            total = total + token.double()
        expected.append(total.float())
    assert torch.equal(sums, torch.stack(expected) if lengths else torch.empty(0, 2))
    weights = torch.randn(len(lengths), 2, generator=generator)
    (sums * weights).sum().backward()
    want = pack.join(weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64), 0))
    if pack.tokens:
        assert torch.equal(values.grad, want)


@given(LENGTHS, alignments())
@settings(max_examples=100, deadline=None)
def test_each_token_is_given_what_its_sequence_has(lengths, alignment):
    pack = Pack.of(lengths, alignment)
    values = torch.arange(1.0, len(lengths) + 1).requires_grad_()
    spread = pack.expand(values, fill=-1.0)
    of_tokens = [n + 1.0 for n, length in enumerate(lengths) for _ in range(length)]
    assert spread[pack.mask].tolist() == of_tokens
    assert (spread[~pack.mask] == -1).all()
    spread.sum().backward()
    assert values.grad.tolist() == [float(length) for length in lengths]


def test_a_loss_of_sequences_takes_the_output_of_a_model_as_it_is():
    pack = Pack.of([3, 2], TokenAlignment(sequence=2, pack=8))
    logprob = torch.arange(8.0)[None]
    assert pack.sums(logprob).tolist() == [0 + 1 + 2, 4 + 5]
    assert pack.sums(pack.mask).tolist() == [3, 2]
    assert [each.tolist() for each in pack.split(logprob)] == [[0, 1, 2], [4, 5]]
    assert pack.sums(logprob.bfloat16()).dtype == torch.float32
    assert pack.sums(logprob.double()).dtype == torch.float64


def test_no_sum_waits_for_the_device():
    pack = Pack.of([3, 2], TokenAlignment(sequence=2, pack=8))
    there = {
        name: getattr(pack, name).to("meta")
        for name in ("cu_seqlens", "position_ids", "mask", "place_N")
    }
    # A tensor without values: a caller that asked for one would raise.
    elsewhere = dataclasses.replace(pack, **there)
    values = torch.empty(8, device="meta", requires_grad=True)
    sums = elsewhere.sums(values)
    assert sums.shape == (2,)
    assert elsewhere.expand(sums).shape == (8,)
    elsewhere.expand(sums).sum().backward()


def test_gradients_go_to_the_sequences_and_not_to_padding():
    pack = Pack.of(torch.tensor([3, 0, 2]), TokenAlignment(sequence=2, pack=12))
    leaf = torch.randn(5, 2, requires_grad=True)
    weight = torch.randn(12, 2)
    joined = pack.join(leaf)
    (joined * weight).sum().backward()
    assert torch.equal(leaf.grad, weight[pack.mask])
    values = torch.randn(12, 2, requires_grad=True)
    sum((n + 1) * part.sum() for n, part in enumerate(pack.split(values))).backward()
    assert values.grad[:, 0].tolist() == [1, 1, 1, 0, 3, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pack: Pack.of([3, -1], TokenAlignment(sequence=1, pack=1)), "[3, -1]"),
        (lambda pack: Pack.of(torch.ones(2), TokenAlignment(sequence=1, pack=1)), "[1.0, 1.0]"),
        (lambda pack: Pack.of([9], TokenAlignment(sequence=1, pack=8), tokens=8), "take 16"),
        (lambda pack: Pack.of([3], TokenAlignment(sequence=1, pack=8), tokens=12), "tokens=12"),
        (lambda pack: pack.join([torch.ones(2), torch.ones(3)]), "(2, 3); the pack has (3, 2)"),
        (lambda pack: pack.join(torch.ones(8)), "8 tokens; the pack has 5"),
        (lambda pack: pack.join([]), "(); the pack has (3, 2)"),
        (lambda pack: Pack.of([], TokenAlignment(sequence=1, pack=8)).join([]), "no sequences"),
        (lambda pack: pack.split(torch.ones(5)), "(5,); the pack has 8 tokens"),
        (lambda pack: pack.sums(torch.ones(2, 8)), "(2, 8); the pack has 8"),
        (lambda pack: pack.expand(torch.ones(3)), "(3,) in a pack of 2 sequences"),
    ],
)
def test_what_does_not_fit_the_pack_is_refused(call, text):
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        call(Pack.of([3, 2], TokenAlignment(sequence=1, pack=8)))
    assert text in str(told.value)
