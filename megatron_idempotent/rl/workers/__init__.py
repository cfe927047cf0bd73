"""Runs the ranks of a policy in processes of their own, and calls methods on all of them.

    ranks = EmbeddedRanks(WorkerSpec(factory="package.module:make", argument=job), size=2)
    await ranks.start()
    losses = await ranks.call("train", batch)

Importing this imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_idempotent.lazy import attributes

from .protocol import RankFailed, RankGroup, RanksLost, RankTraceback, WorkerSpec

if TYPE_CHECKING:
    from .embedded import EmbeddedRanks
    from .exports import Exports, RemoteWeights
    from .ray import RayRanks
    from .torchrun import TorchrunRanks, run_rank, under_torchrun

# Resolved at first use: the exports import torch.
_HOMES = {
    "EmbeddedRanks": "embedded",
    "Exports": "exports",
    "RayRanks": "ray",
    "RemoteWeights": "exports",
    "TorchrunRanks": "torchrun",
    "run_rank": "torchrun",
    "under_torchrun": "torchrun",
}

__all__ = [
    "EmbeddedRanks",
    "Exports",
    "RankFailed",
    "RankGroup",
    "RankTraceback",
    "RanksLost",
    "RayRanks",
    "RemoteWeights",
    "TorchrunRanks",
    "WorkerSpec",
    "run_rank",
    "under_torchrun",
]


__getattr__ = attributes(__name__, _HOMES)
