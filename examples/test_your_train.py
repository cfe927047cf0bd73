"""Test that your framework's `train()` can be called twice, without a GPU.

    pytest examples/test_your_train.py

The package provides the fixture `megatron_ranks`, which runs a function on CPU ranks with the real
Megatron. Replace `train` by your own loop.
"""

from __future__ import annotations

from typing import Any

import pytest

import megatron_idempotent


def train(model: Any, steps: int, seed: int) -> None:
    """Take `steps` optimizer steps; replace this by your own loop."""
    for step in range(steps):
        model.forward_backward(4, data_seed=seed + step)
        model.step()


def train_in_calls(calls: list[int]) -> bytes:
    """Train on a rank, in calls with these numbers of steps; return the parameters' bits."""
    import torch

    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(overlap_grad_reduce=True, overlap_param_gather=True)
    done = 0
    for steps in calls:
        train(model, steps, seed=done)
        done += steps
    megatron_idempotent.ensure_params_synced(model.chunks)  # finish the last step's gather
    parameters = [each.detach().flatten() for each in model.chunks[0].module.parameters()]
    return torch.cat(parameters).cpu().numpy().tobytes()


@pytest.mark.parametrize("calls", [[2, 2], [1, 3], [1, 1, 1, 1]])
def test_several_calls_have_the_bits_of_one(megatron_ranks, calls):
    assert megatron_ranks(2, train_in_calls, calls) == megatron_ranks(2, train_in_calls, [4])
