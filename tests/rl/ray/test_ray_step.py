"""The step in Ray actors: one per rank, each with the CPU runtime."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest


class Policy:
    """A framework makes an actor of this: a rank with its model and its step."""

    def __init__(self, rank: int, world_size: int, port: int, step_class: Any) -> None:
        from megatron_idempotent.proof import cpu

        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        cpu.enable()
        import torch

        torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
        from scenario import TokenLoss, build, data, forward

        model, scheduler, self._replica = build()
        self._step = step_class(
            model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20
        )
        self._loss, self._data = TokenLoss(), data

    def train(self, number: int) -> tuple[float | None, dict[str, float]]:
        """One step of two batches."""
        step_id = self._step.begin(self._loss, global_batch_size=8, micro_batch_size=2)
        self._step.microbatch(step_id, self._data(number, 2, self._replica))
        self._step.microbatch(step_id, self._data(number + 10, 4, self._replica), last=True)
        result = self._step.finish(step_id)
        return result.grad_norm, dict(result.metrics)


@pytest.mark.filterwarnings("ignore")  # of what Megatron imports, in this process
@pytest.mark.parametrize("by_value", [False, True])
def test_steps_of_actors_agree(cluster, by_value):
    import sys

    import cloudpickle

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    from megatron_idempotent import TrainStep

    own = [m for name, m in sys.modules.items() if name.startswith("megatron_idempotent.step.")]
    for module in own if by_value else ():
        cloudpickle.register_pickle_by_value(module)
    ranks = []
    try:
        actor = cluster.remote(Policy)
        ranks = [actor.remote(rank, 2, port, TrainStep) for rank in range(2)]
        for number in range(2):
            first, second = cluster.get([rank.train.remote(number) for rank in ranks], timeout=300)
            assert first == second
            assert first[0] > 0
    finally:
        for rank in ranks:
            cluster.kill(rank)
        for module in own if by_value else ():
            cloudpickle.unregister_pickle_by_value(module)
