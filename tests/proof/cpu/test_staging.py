"""Collectives through host memory, as ranks that share a GPU need them.

The code is that of a GPU; here it stages the tensors of the CPU, so that it is known to run, and to
compute what gloo does without it.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest


def begin() -> None:
    """Runs on a rank: stage CPU tensors, under whatever name Megatron calls a collective by."""
    from megatron_idempotent.proof.cpu import collectives

    replaced = {id(getattr(owner, name)): new for owner, name, new in collectives.replacements()}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("megatron.", "torch.distributed")):
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, name, replaced[id(value)])
    collectives.begin("cpu")


def each_collective(staged: bool, async_op: bool) -> dict[str, Any]:
    """Runs on two ranks: what every collective gives, and whether it wrote before its handle's
    wait."""
    import torch
    import torch.distributed as dist

    if staged:
        begin()
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def mine(*shape: int) -> torch.Tensor:
        return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) + 10 * rank

    def run(name: str, out: Any, *args: Any, **kwargs: Any) -> None:
        outs = out if isinstance(out, list) else [out]
        before = [each.clone() for each in outs]
        handle = getattr(dist, name)(*args, async_op=async_op, **kwargs)
        if async_op:
            if staged and name != "gather":
                same = [torch.equal(a, b) for a, b in zip(outs, before, strict=True)]
                found[f"{name} waits"] = all(same)
            handle.wait()
        found[name] = [each.tolist() for each in outs]

    def none(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1.0)

    out = mine(3)
    run("all_reduce", out, out)
    run("broadcast", out := mine(3) + rank, out, src=1)
    run("all_gather", out := [none(3), none(3)], out, mine(3))
    run("all_gather_into_tensor", out := none(6), out, mine(3))
    run("reduce_scatter_tensor", out := none(3), out, mine(6))
    run("reduce_scatter", out := none(3), out, [mine(3), mine(3) + 1])
    run("all_to_all_single", out := none(4), out, mine(4))
    received = [none(3), none(3)] if rank == 0 else None
    run("gather", received or [], mine(3), received, dst=0)
    run("scatter", out := none(3), out, [mine(3), mine(3) + 1] if rank == 0 else None, src=0)
    return found


@pytest.mark.parametrize("async_op", [False, True])
def test_a_staged_collective_gives_what_gloo_gives_and_writes_when_it_is_waited_for(
    async_op, megatron_ranks
):
    plain = megatron_ranks(2, each_collective, False, async_op)
    staged = megatron_ranks(2, each_collective, True, async_op)
    waits = [[rank.pop(name) for name in list(rank) if name.endswith("waits")] for rank in staged]
    assert staged == plain
    assert waits == [[True] * (8 if async_op else 0)] * 2


def messages_and_coalesced(staged: bool) -> list[Any]:
    """Runs on two ranks: messages, in batches and alone, and collectives that are coalesced."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if staged:
        begin()
    rank = dist.get_rank()
    sent, got = torch.arange(4.0) + rank, torch.zeros(4)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    found = [got.tolist()]
    if rank:
        dist.send(sent, 0)
    else:
        found.append(dist.recv(got, 1))
    found.append(got.tolist())
    for async_ops in (False, True):
        buffers = [torch.arange(4.0) + rank, 2 * torch.arange(6.0) + rank]
        parts = [buffer[: len(buffer) // 2] for buffer in buffers]
        with distributed_c10d._coalescing_manager(async_ops=async_ops) as handle:
            for part, buffer in zip(parts, buffers, strict=True):
                dist.reduce_scatter_tensor(part, buffer)
        if async_ops:
            found.append([part.tolist() for part in parts])
            handle.wait()
        found.append([part.tolist() for part in parts])
    return found


def test_messages_and_coalesced_collectives_are_staged_too(megatron_ranks):
    plain = megatron_ranks(2, messages_and_coalesced, False)
    staged = megatron_ranks(2, messages_and_coalesced, True)
    for mine, theirs in zip(staged, plain, strict=True):
        before_wait = mine.pop(-2)
        theirs.pop(-2)  # gloo may have written by then
        assert mine == theirs
        assert before_wait != mine[-1]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2, overlap": (2, {"overlap_param_gather": True}),
    "dp2, all-reduce": (2, {"distributed_optimizer": False}),
    "pp2": (2, {"pp": 2, "layers_per_stage": 1}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True}),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "moe, ep2": (2, {"ep": 2, "experts": 4}),
}


USUAL = ("dp2, overlap", "pp2 vpp2", "moe, ep2")


def windows(staged: bool, options: dict[str, Any]) -> tuple[list[Any], int]:
    """Runs on a rank: losses and parameters of two steps, and how many tensors were copied back."""
    from megatron_idempotent.proof.cpu import collectives, tiny

    copied = 0
    if staged:
        begin()
        original = collectives._Copying.copy_back

        def counted(self: Any) -> None:
            nonlocal copied
            copied += len(self._copies)
            original(self)

        collectives._Copying.copy_back = counted
    bench = tiny.build(**options)
    found: list[Any] = []
    for seed in range(2):
        found.append(bench.forward_backward(4, data_seed=seed))
        found.append(str(bench.step()))
        found.append(bench.parameters().numpy().tobytes())
    return found, copied


@pytest.mark.parametrize(
    "layout",
    [
        each if each in USUAL else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in LAYOUTS
    ],
)
def test_megatron_computes_the_same_bits_through_host_memory(layout, megatron_ranks):
    ranks, options = LAYOUTS[layout]
    plain = megatron_ranks(ranks, windows, False, options)
    staged = megatron_ranks(ranks, windows, True, options)
    assert [found for found, _ in staged] == [found for found, _ in plain]
    assert all(copied > 5 for _, copied in staged), "nothing was staged"
