"""Targets of padded and packed batches, and the parts of context-parallel ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.logprobs import (
    context_parallel_part,
    context_parallel_whole,
    shift_targets,
)

IGNORED = -100


def row_by_row(tokens: list[int], lengths: list[int]) -> list[int]:
    """Shift the targets of packed sequences, in plain Python."""
    targets, start = [], 0
    for length in lengths:
        sequence = tokens[start : start + length]
        targets += [*sequence[1:], IGNORED][:length]
        start += length
    return targets + [IGNORED] * (len(tokens) - start)


def test_the_next_token_of_the_same_sequence():
    """Against the loop, sequences without tokens and tokens after them included."""
    for seed in range(200):
        draw = random.Random(seed)
        lengths = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randrange(1, 6))]
        tokens = [draw.randrange(9) for _ in range(sum(lengths) + draw.choice([0, 3]))]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        found = shift_targets(torch.tensor(tokens, dtype=torch.int64), cu_seqlens=ends)
        assert found.tolist() == row_by_row(tokens, lengths)
        rows, longest = len(lengths), max(lengths) + draw.choice([0, 2])
        padded = torch.randint(0, 9, (rows, longest))
        mask = torch.zeros(rows, longest)
        for row, length in enumerate(lengths):
            first = draw.choice([0, longest - length])
            mask[row, first : first + length] = 1
        found = shift_targets(padded, mask=draw.choice([mask, mask.bool()]))
        for row in range(rows):
            real = mask[row].bool()
            sequence = padded[row][real].tolist()
            assert found[row][real].tolist() == row_by_row(sequence, [len(sequence)])
            assert (found[row][~real] == IGNORED).all()
    assert shift_targets(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, IGNORED]]


def parts() -> None:
    """Runs on a rank: against Megatron's own, and of packed sequences one by one."""
    import inspect

    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    rank = parallel_state.get_context_parallel_rank()
    tokens = torch.arange(3 * 8 * size).view(3, 8 * size)
    asked = inspect.signature(get_batch_on_this_cp_rank).parameters  # 0.19 wants to know
    hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in asked else {}
    expected = get_batch_on_this_cp_rank({"tokens": tokens}, **hybrid)["tokens"]
    mine = context_parallel_part(tokens, rank=rank, size=size)
    assert torch.equal(mine, expected)
    by_hidden = context_parallel_part(
        tokens.t()[..., None].expand(-1, -1, 5), rank=rank, size=size, dim=0
    )
    assert torch.equal(by_hidden[..., 2], expected.t())
    lengths = [2 * size, 0, 6 * size, 4 * size]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = torch.arange(sum(lengths))
    found = context_parallel_part(packed, rank=rank, size=size, cu_seqlens=ends)
    one_by_one = [
        context_parallel_part(sequence, rank=rank, size=size)
        for sequence in packed.split(lengths)
        if len(sequence)
    ]
    assert torch.equal(found, torch.cat(one_by_one))
    if size == 1:
        odd = torch.arange(3)
        assert context_parallel_part(odd, rank=0, size=1) is odd


@pytest.mark.parametrize("ranks", [1, 4])
def test_parts_are_those_of_megatron(megatron_ranks, ranks):
    megatron_ranks(ranks, parts)


def test_the_parts_of_all_ranks_are_the_whole_again():
    """Rows and packs of any lengths."""
    for seed in range(200):
        draw = random.Random(seed)
        size = draw.choice([1, 2, 3, 4, 8])
        multiple = 2 * size if size > 1 else 1
        lengths = [multiple * draw.choice([0, 1, 2, 5]) for _ in range(draw.randrange(1, 6))]
        packed = draw.random() < 0.7
        total = sum(lengths) if packed else multiple * draw.randrange(1, 5)
        ends = torch.tensor([0, *lengths]).cumsum(0).int() if packed else None
        dim = draw.choice([0, 1, -1])
        shape = [2, 3]
        shape.insert(dim if dim >= 0 else 2, total)
        whole = torch.randn(shape, requires_grad=True)
        arguments: dict[str, Any] = {"cu_seqlens": ends, "dim": dim}
        parts = [
            context_parallel_part(whole, rank=rank, size=size, **arguments) for rank in range(size)
        ]
        again = context_parallel_whole(torch.stack(parts), **arguments)
        assert torch.equal(again, whole)
        assert torch.equal(context_parallel_whole(parts, **arguments), whole)
        weight = torch.randn(shape)
        (again * weight).sum().backward()
        assert torch.equal(whole.grad, weight)


@pytest.mark.parametrize("ranks", [1, 4])
@on_ranks("ranks")
def test_a_loss_of_gathered_parts_has_the_gradient_of_one_rank() -> None:
    """The same over a group, and both gradients that a loss may mean."""
    group = torch.distributed.group.WORLD
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    lengths = [2 * size, 0, 6 * size, 4 * size]
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    whole = torch.arange(float(sum(lengths))).cuda() + 1
    mine = context_parallel_part(whole, rank=rank, size=size, cu_seqlens=ends)
    for losses in ("same", "parts"):
        leaf = mine.clone().requires_grad_()
        found = context_parallel_whole(leaf, group=group, cu_seqlens=ends, losses=losses)
        assert torch.equal(found, whole)
        # One loss, of all positions; or of one of its parts on each rank.
        theirs = [
            context_parallel_part(whole, rank=each, size=size, cu_seqlens=ends)
            for each in range(size)
        ]
        counted = torch.isin(whole, theirs[rank]) if losses == "parts" else 1
        (found**2 * counted).sum().backward()
        assert torch.equal(leaf.grad, 2 * mine)


def test_no_value_is_read_and_types_stay():
    narrow = shift_targets(torch.arange(8, dtype=torch.int32))
    assert narrow.dtype == torch.int32
    assert narrow.tolist() == [1, 2, 3, 4, 5, 6, 7, -100]
    # A tensor without values: a caller that asked for one would raise.
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    there = torch.empty(2, 8, dtype=torch.int64, device="meta")
    assert shift_targets(there, mask=there, cu_seqlens=ends).shape == there.shape
    part = context_parallel_part(there, rank=0, size=2, cu_seqlens=ends)
    assert part.shape == (2, 4)
    assert context_parallel_whole([part, part], cu_seqlens=ends).shape == (2, 8)
