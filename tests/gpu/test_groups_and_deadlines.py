"""Agreement, deadlines and new groups where the default group is NCCL's.

Its watchdog ends a process whose collective hangs; agreement is on gloo groups beside it, so a
deadline is an error that can be met, and the process lives on.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny


def agreed() -> list[str]:
    """Runs on a rank: what `agree` raises with and without an error, and a sum that works after
    it."""
    found = []
    megatron_idempotent.window.agree()
    error = ValueError("a bad batch") if dist.get_rank() == dist.get_world_size() - 1 else None
    try:
        megatron_idempotent.window.agree(error)
    except megatron_idempotent.WindowAborted as aborted:
        found.append(str(sorted(aborted.failures.items())))
    total = torch.ones(2, device="cuda")
    dist.all_reduce(total)
    return [*found, str(total.tolist())]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_one_rank_is_raised_on_all_and_the_groups_go_on(ranks, megatron_ranks):
    for found in megatron_ranks(ranks, agreed):
        assert found == [f"[({ranks - 1}, 'ValueError: a bad batch')]", str([float(ranks)] * 2)]


def late_for_a_deadline() -> str:
    """Runs on two ranks: one comes too late to agree."""
    megatron_idempotent.window.agree(deadline_s=2.0)  # makes the group
    if dist.get_rank():
        time.sleep(4.0)
    try:
        megatron_idempotent.window.agree(deadline_s=2.0)
    except megatron_idempotent.SessionPoisoned as poisoned:
        return str(poisoned)
    return "agreed"


def test_a_rank_that_misses_a_deadline_is_an_error_and_no_end_of_a_process(megatron_ranks):
    found = megatron_ranks(2, late_for_a_deadline)
    assert "did not agree within 2 s" in found[0]


def rebuilt(rebuild: bool) -> tuple[list[float], bytes, str]:
    """Runs on a rank: a step before and after all process groups were made again."""
    megatron_idempotent.apply()
    bench = tiny.build(overlap_param_gather=True)
    losses = bench.forward_backward(2, data_seed=0)
    bench.step()
    if rebuild:
        megatron_idempotent.window.rebuild_process_groups(bench.chunks, bench.optimizer)
    losses += bench.forward_backward(2, data_seed=1)
    bench.step()
    megatron_idempotent.ensure_params_synced(bench.chunks)
    return losses, bench.bits(), dist.get_backend()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_to_the_bit_on_groups_that_were_made_anew(ranks, device, megatron_ranks):
    once = megatron_ranks(ranks, rebuilt, True)
    assert once == megatron_ranks(ranks, rebuilt, False)
    if device == "cuda" and ranks == 1:
        assert once[0][2] == "nccl"
