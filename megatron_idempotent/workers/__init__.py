"""Ranks of a policy in processes of their own, and calls on all of them.

    ranks = EmbeddedRanks(WorkerSpec(factory="package.module:make", argument=job), size=2)
    await ranks.start()
    losses = await ranks.call("train", batch)

Importing this imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import RankFailed, RanksLost, RankTraceback
from .protocol import RankGroup, WorkerSpec

if TYPE_CHECKING:
    from .embedded import EmbeddedRanks
    from .exports import Exports, RemoteWeights
    from .ray_ranks import RayRanks
    from .torchrun import TorchrunRanks, run_rank, under_torchrun

# Resolved at first use: the exports import torch.
_HOMES = {
    "EmbeddedRanks": "embedded",
    "Exports": "exports",
    "RayRanks": "ray_ranks",
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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from megatron_idempotent.missing import naming_the_remedy

        with naming_the_remedy(f"{__name__}.{name}"):
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
