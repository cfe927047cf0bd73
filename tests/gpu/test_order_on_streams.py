"""Right bits where the device runs far later than the host, as it does in every real step.

A kernel that does nothing for some milliseconds is queued before each microbatch, so that whatever
reads a value without waiting for it, on another stream or on the host, reads an old one. Without a
GPU every call has finished when it returns, and the programs only run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_idempotent
from megatron_idempotent.proof.cpu import is_enabled, tiny

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"overlap_param_gather": True}),
    "one rank, all-reduce, bf16": (1, {"distributed_optimizer": False, "dtype": "bf16"}),
    "two replicas": (2, {"overlap_param_gather": True}),
    "two stages": (2, {"pp": 2, "layers_per_stage": 1}),
}
#: About 10 ms on a GPU of 2 GHz; a window's kernels take less.
CYCLES = 20_000_000


def fall_behind() -> None:
    """Queue a kernel that takes its time, on a GPU."""
    if not is_enabled():
        torch.cuda._sleep(CYCLES)


def build(options: dict[str, Any], late: bool) -> Any:
    megatron_idempotent.apply(strict=True)
    bench = tiny.build(**options)
    if late:

        def on_microbatch(index: int, loss: Any) -> None:
            fall_behind()

        bench.on_microbatch = on_microbatch
    return bench


def windows(options: dict[str, Any], late: bool) -> list[Any]:
    """Runs on a rank: losses, gradients and parameters of three steps."""
    bench = build(options, late)
    found: list[Any] = []
    for seed in range(3):
        found.append(bench.forward_backward(4, data_seed=seed))
        found.append(bench.gradients().numpy().tobytes())
        found.append(tuple(map(str, bench.step())))
        found.append(bench.bits())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlapped_reductions_read_gradients_that_are_late(layout, megatron_ranks):
    ranks, options = LAYOUTS[layout]
    assert megatron_ranks(ranks, windows, options, True) == megatron_ranks(
        ranks, windows, options, False
    )


def after_an_abort(options: dict[str, Any], late: bool, aborted: bool) -> list[Any]:
    """Runs on a rank: a step after a window that raised in its last microbatch, while kernels
    wait."""
    bench = build(options, late)
    if aborted:
        usual = bench.on_microbatch

        def raising(index: int, loss: Any) -> None:
            if usual is not None:
                usual(index, loss)
            if index == 3 and loss is not None:
                raise ValueError("a bad batch")

        bench.on_microbatch = raising
        with pytest.raises(ValueError, match="a bad batch"):
            bench.forward_backward(4, data_seed=7)
        megatron_idempotent.abort_window(bench.chunks, bench.optimizer)
        bench.on_microbatch = usual
    found = [bench.forward_backward(4, data_seed=8), bench.gradients().numpy().tobytes()]
    return [*found, str(bench.step()), bench.bits()]


@pytest.mark.parametrize("layout", ["one rank", "two replicas"])
def test_a_window_after_an_abort_waits_for_what_the_aborted_one_left_queued(layout, megatron_ranks):
    ranks, options = LAYOUTS[layout]
    clean = megatron_ranks(ranks, after_an_abort, options, False, False)
    assert megatron_ranks(ranks, after_an_abort, options, True, True) == clean


def reductions_and_kernels() -> tuple[list[str], int]:
    """Runs on a rank with a GPU: which kernels ran on more than one stream, and how many
    reductions."""
    from torch.profiler import ProfilerActivity, profile

    bench = build({"overlap_param_gather": True}, late=False)
    bench.train_step(4, data_seed=0)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        bench.train_step(4, data_seed=1)
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if "nccl" in e.name.lower() or "c10d::" in e.name]
    return sorted({event.name for event in events}), len(events)


@pytest.mark.gpu
def test_reductions_of_one_rank_are_issued_to_nccl(gpu_ranks):
    ((names, number),) = gpu_ranks(1, reductions_and_kernels)
    assert number > 3, names
    assert any("reduce_scatter" in name for name in names), names
