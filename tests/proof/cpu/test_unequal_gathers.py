"""Collectives of unequal parts give what NCCL gives: the parts as they are, or their sums."""

import pytest
import torch
import torch.distributed as dist

from megatron_idempotent.proof import cpu

SIZES = (3, 0, 5)


def part(rank, dtype):
    """Return the part of `rank`, [rows, 2]; no two rows are alike."""
    rows = torch.arange(SIZES[rank] * 2) + 100 * rank + 1
    return rows.view(-1, 2).to(dtype)


def gathered_wrong():
    """Names of the gathers whose outputs are not the parts of all ranks, in order."""
    rank = dist.get_rank()
    wrong = []

    def check(name, outputs, expected):
        if not all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)):
            wrong.append(name)

    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        expected = [part(r, dtype) for r in range(3)]
        # As Megatron has it: the outputs are views of one tensor, the input is one of them.
        whole = torch.zeros(sum(SIZES), 2, dtype=dtype)
        views = list(torch.split(whole, SIZES))
        views[rank].copy_(part(rank, dtype))
        assert dist.all_gather(views, views[rank]) is None
        check(f"views {dtype}", [whole], [torch.cat(expected)])
        outputs = [torch.zeros_like(e) for e in expected]
        handle = dist.all_gather(outputs, part(rank, dtype), async_op=True)
        handle.wait()
        assert handle.is_completed()
        check(f"asynchronous {dtype}", outputs, expected)
        outputs[0].zero_()
        handle.wait()
        check(f"waited for twice {dtype}", outputs[1:], expected[1:])
        assert not outputs[0].any()

    weight = part(rank, torch.float64).requires_grad_()
    outputs = [torch.zeros(size, 2, dtype=torch.float64) for size in SIZES]
    dist.all_gather(outputs, weight)
    assert not any(output.requires_grad for output in outputs)
    shaped = [torch.zeros(6), torch.zeros(2, 3)]
    pair = dist.new_group([0, 2])
    result = dist.all_gather(shaped, torch.full((6,), float(rank)), group=pair)
    if rank == 1:
        assert result is None
    else:
        check("a group", shaped, [torch.full((6,), 0.0), torch.full((2, 3), 2.0)])
    return wrong


def sums_wrong():
    """Names of the reduce-scatters that are not the sums of all ranks' parts."""
    rank = dist.get_rank()
    wrong = []
    for operation, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)):
        sent = [torch.full((size, 2), (rank + 1) * 10.0 + i) for i, size in enumerate(SIZES)]
        kept = [tensor.clone() for tensor in sent]
        output = torch.empty(SIZES[rank], 2)
        dist.reduce_scatter(output, sent, op=operation)
        expected = torch.full_like(output, (10 + 20 + 30 + 3 * rank) / divisor)
        if not torch.equal(output, expected) or not all(map(torch.equal, sent, kept)):
            wrong.append(str(operation))
    return wrong


def sends_too_much():
    dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(4))


def test_unequal_parts_are_gathered_and_reduced_as_they_are(megatron_ranks):
    assert megatron_ranks(3, gathered_wrong) == [[]] * 3
    assert megatron_ranks(3, sums_wrong) == [[]] * 3


def test_a_part_of_another_size_than_its_output_is_refused_with_both(megatron_ranks):
    with pytest.raises(cpu.RankError) as caught:
        megatron_ranks(2, sends_too_much)
    messages = [failure.message for failure in caught.value.failures]
    assert any("sends 4 elements, but its entry of tensor_list holds" in m for m in messages)
