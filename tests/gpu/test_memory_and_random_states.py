"""A step gives back the device memory that it takes, whatever its end, and the random states."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny


def random_states(abort: bool) -> list[Any]:
    """Runs on a rank: what is drawn next, after a step in pieces that was undone or never begun."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from benchmarks._step_sides import Sides, TokenLoss

    sides = Sides(64, 4, 2, config_overrides={"hidden_dropout": 0.1, "attention_dropout": 0.1})
    megatron_idempotent.apply()
    if abort:
        step = sides.step
        step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=2)
        for piece in list(sides.pieces(4))[:3]:
            step.microbatch(step_id, piece)
        step.abort(step_id)
    drawn = [torch.rand(4, device="cuda").tolist(), torch.rand(4).tolist()]
    with get_cuda_rng_tracker().fork():
        drawn.append(torch.rand(4, device="cuda").tolist())
    return drawn


def test_an_undone_step_leaves_the_random_states_as_they_were(megatron_ranks):
    assert megatron_ranks(1, random_states, True) == megatron_ranks(1, random_states, False)


def allocated(ends: tuple[str, ...]) -> list[int]:
    """Runs on a rank with a GPU: bytes that are allocated after steps that end so."""
    megatron_idempotent.apply()
    bench = tiny.build(overlap_param_gather=True, config_overrides={"hidden_size": 256})
    found = []
    for end in ends:

        def on_microbatch(index: int, loss: Any, end: str = end) -> None:
            if index == 2 and loss is not None and end == "abort":
                raise ValueError("a bad batch")

        bench.on_microbatch = on_microbatch
        try:
            bench.train_step(4, data_seed=0)
        except ValueError:
            megatron_idempotent.abort_window(bench.chunks, bench.optimizer)
        gc.collect()
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated())
    return found


@pytest.mark.gpu
def test_an_aborted_window_gives_back_the_memory_that_it_took(gpu_ranks):
    (found,) = gpu_ranks(1, allocated, ("step", "step", "abort", "step", "abort", "abort"))
    # The first step makes the optimizer's state; no later end may hold more than a good one.
    assert max(found[2:]) <= found[1], found


def taken_and_given_back() -> tuple[int, int, int, list[list[float]]]:
    """Runs on a rank with a GPU: bytes allocated with gradient buffers on it, off it and back, and
    the losses of three steps with and without that between them."""
    megatron_idempotent.apply()

    losses: list[list[float]] = []
    for moves in (False, True):
        bench = tiny.build(config_overrides={"hidden_size": 256})
        (chunk,) = bench.chunks
        losses.append([])
        for seed in range(3):
            losses[-1] += bench.forward_backward(4, data_seed=seed)
            bench.step()
            sizes = [torch.cuda.memory_allocated()]
            for move in (chunk.offload_grad_buffers, chunk.restore_grad_buffers) * moves:
                move()
                torch.cuda.synchronize()
                sizes.append(torch.cuda.memory_allocated())
    on_device, off_device, back = sizes
    return on_device, off_device, back, losses


@pytest.mark.gpu
def test_gradient_buffers_leave_the_device_and_come_back(gpu_ranks):
    ((on_device, off_device, back, losses),) = gpu_ranks(1, taken_and_given_back)
    assert off_device < on_device == back
    assert losses[0] == losses[1]
