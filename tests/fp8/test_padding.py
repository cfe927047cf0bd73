"""Left padding taken away and put back, bit for bit as a loop over rows does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.fp8.packing import TokenAlignment
from megatron_idempotent.fp8.padding import recover_left_padding, remove_left_padding

PAD = 7


def removed_by_row(batch: Any, mask: Any, width: int, fill: Any) -> Any:
    moved = batch.new_full((len(batch), width, *batch.shape[2:]), fill)
    for row, real in enumerate(mask.bool()):
        moved[row, : int(real.sum())] = batch[row, real]
    return moved


def recovered_by_row(values: Any, mask: Any, fill: Any) -> Any:
    put = values.new_full((*mask.shape, *values.shape[2:]), fill)
    for row, real in enumerate(mask.bool()):
        put[row, real] = values[row, : int(real.sum())]
    return put


def bits(tensor: Any) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@st.composite
def masks(draw: st.DrawFn) -> Any:
    """Padded on the left mostly; on both sides, not at all, and rows without tokens too."""
    rows, positions = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    mask = torch.zeros(rows, positions, dtype=draw(st.sampled_from([torch.bool, torch.int64])))
    for row in range(rows):
        first = draw(st.integers(0, positions))
        end = draw(st.sampled_from([positions, draw(st.integers(first, positions))]))
        mask[row, first:end] = 1
    return mask


@st.composite
def batches(draw: st.DrawFn, mask: Any) -> Any:
    """Return values for each position of the mask, not always adjacent in memory."""
    trailing = draw(st.sampled_from([(), (3,), (2, 0), (2, 3)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    batch = torch.randn(*mask.shape, *trailing)
    # In padding stands what must not be looked at.
    batch[~mask.bool()] = draw(st.sampled_from([torch.nan, torch.inf, -0.0]))
    if draw(st.booleans()):
        batch = batch.transpose(0, 1).contiguous().transpose(0, 1)
    return batch


@given(st.data(), masks(), st.sampled_from([None, 1, 4]))
@settings(max_examples=200, deadline=None)
def test_rows_are_moved_as_by_a_loop(data, mask, multiple):
    batch = data.draw(batches(mask))
    positions = torch.arange(mask.numel()).view(mask.shape)
    alignment = multiple and TokenAlignment(sequence=1, pack=multiple)
    longest = int(mask.sum(-1).max()) if mask.numel() else 0
    width = -(-longest // (multiple or 1)) * (multiple or 1)
    found = remove_left_padding(
        batch, mask, position_ids=positions, alignment=alignment, pad_id=PAD
    )
    assert bits(found.tokens) == bits(removed_by_row(batch, mask, width, PAD))
    assert bits(found.mask) == bits(removed_by_row(mask, mask, width, 0))
    assert found.mask.dtype == mask.dtype
    assert bits(found.position_ids) == bits(removed_by_row(positions, mask, width, 0))
    counted = remove_left_padding(batch, mask, alignment=alignment).position_ids
    assert bits(counted) == bits(torch.arange(width) * found.mask.long())


@given(st.data(), masks(), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_results_and_their_gradients_are_put_back_as_by_a_loop(data, mask, more):
    longest = int(mask.sum(-1).max()) if mask.numel() else 0
    shape = torch.zeros(len(mask), longest + more)
    real = torch.arange(longest + more) < mask.bool().sum(-1)[:, None]
    values = data.draw(batches(real)) if shape.numel() else shape
    gradient = torch.randn(*mask.shape, *values.shape[2:])
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    found = recover_left_padding(ours, mask, fill=-1.5)
    expected = recovered_by_row(theirs * 1, mask, -1.5)
    assert bits(found) == bits(expected)
    found.backward(gradient)
    # The loop's result is not in the graph where it has written nothing.
    wanted = torch.zeros_like(values)
    if expected.requires_grad:
        wanted = torch.autograd.grad(expected, theirs, gradient)[0]
    assert bits(ours.grad) == bits(wanted)


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda m, v: remove_left_padding(v, m, alignment=None), ["row 1", "2 tokens", "from po"]),
        (lambda m, v: recover_left_padding(v, m), ["recover_left_padding", "row 1", "holes"]),
        (lambda m, v: remove_left_padding(v, m[:, 1:]), ["(2, 4)", "(2, 3)"]),
        (lambda m, v: remove_left_padding(v, m[0]), ["(4,)"]),
        (lambda m, v: remove_left_padding(v, m, position_ids=v[:1]), ["position_ids", "(1, 4)"]),
        (lambda m, v: recover_left_padding(v[:, :1], m[:1]), ["(2, 1)", "1 rows"]),
        (lambda m, v: recover_left_padding(v[:1, :1], m[:1]), ["up to 2 tokens", "tp_group"]),
    ],
)
def test_holes_and_shapes_that_do_not_fit_are_refused(call, texts):
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        call(mask, torch.zeros(2, 4))
    assert all(text in str(told.value) for text in texts), str(told.value)


def gathered(cases: int) -> list[bytes]:
    """Runs on a rank: pieces of the positions, against Megatron's gather and the loop; the
    results."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from megatron_idempotent import token_logprobs

    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    group = parallel_state.get_tensor_model_parallel_group()
    alignment = TokenAlignment(sequence=1, pack=size)
    out = []
    for seed in range(cases):
        torch.manual_seed(seed)
        lengths = torch.randint(0, 7, (3,))
        mask = torch.arange(8) >= 8 - lengths[:, None]
        width = alignment.of_pack([int(lengths.max())])
        whole, weight = torch.randn(3, width, 4), torch.randn(3, 8, 4)

        def piece(values: Any) -> Any:
            return values.chunk(size, 1)[rank].clone().requires_grad_()

        if not width:
            continue
        ours, theirs, alone = piece(whole), piece(whole), whole.clone().requires_grad_()
        found = recover_left_padding(ours, mask, tp_group=group)
        by_megatron = gather_from_sequence_parallel_region(
            theirs.transpose(0, 1), tensor_parallel_output_grad=False
        )
        expected = recovered_by_row(by_megatron.transpose(0, 1), mask, 0)
        assert bits(found) == bits(expected)
        # The same on all ranks, as a loss of whole rows is: no rank's gradient counts twice.
        (found * weight).sum().backward()
        (recovered_by_row(alone * 1, mask, 0) * weight).sum().backward()
        assert bits(ours.grad) == bits(alone.grad.chunk(size, 1)[rank])
        (expected * weight).sum().backward()
        assert bits(ours.grad) == bits(theirs.grad)

        # Into a layer whose columns the ranks share, which adds up what they know of its input.
        output, targets = torch.randn(6 * size, 4), torch.randint(0, 6 * size, (3, 8))
        ours.grad = alone.grad = None
        for leaf, part, arguments in (
            (recover_left_padding(ours, mask, tp_group=group), output.chunk(size)[rank], group),
            (recover_left_padding(alone, mask), output, None),
        ):
            stats = token_logprobs(
                hidden=leaf, weight=part, targets=targets, token_mask=mask, tp_group=arguments
            )
            stats.logprob.sum().backward()
        torch.testing.assert_close(ours.grad, alone.grad.chunk(size, 1)[rank])
        out.append(bits(found))
    return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_pieces_of_ranks_are_gathered_and_their_gradients_are_cut(megatron_ranks, ranks):
    first, *others = megatron_ranks(ranks, gathered, 12)
    assert len(first) > 5
    assert all(other == first for other in others)
