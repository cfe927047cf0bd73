"""Seeding raises on some ranks if expert and tensor parallelism are both large.

Symptom:
    `Exception: seed 2725 already exists` from `model_parallel_cuda_manual_seed` on single ranks,
    for example expert rank 17 with tensor rank 6. The other ranks go on and hang in the next
    collective.

Cause:
    The expert layers' seed is the base + 1024 + 100 × expert rank + expert tensor rank, that of
    tensor parallelism the base + 2718 + tensor rank. From expert rank 16 or 17 on the two can be
    equal.

Affects:
    Every release; 0.12 takes no ranks as arguments and shows it only at that scale. What the patch
    does: if the expert layers' seed is already in use, it adds 2²⁰. No other rank's seed changes.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `model_parallel_cuda_manual_seed`.

Remove when:
    the two ranges of seeds cannot overlap. `upstream/expert-seed-collides` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, address, target

_OFFSET = 2**20


def add(original: Original, self: Any, name: str, seed: int) -> None:
    """Wrap the adding of a random stream: add an offset to the seed of experts if another stream
    has the same seed.
    """
    from megatron.core.tensor_parallel.random import _EXPERT_PARALLEL_RNG_TRACKER_NAME

    if seed in self.seeds_ and name == _EXPERT_PARALLEL_RNG_TRACKER_NAME:
        seed += _OFFSET
    original(self, name, seed)


def reproduce() -> None:
    """Seed as expert-parallel rank 17 with tensor-parallel rank 6 does.
    On stock Megatron this raises, because two streams get one seed.
    """
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(1, tp_rank=6, ep_rank=17, etp_rank=0)


PATCH = Patch(
    "seeding raises on some ranks from expert rank 16 on: two seeds are the same",
    target("random.CudaRNGStatesTracker.add", add),
    since="0.13",
    fixed_by=(
        (
            address("random.model_parallel_cuda_manual_seed"),
            "expert_parallel_seed == tensor_model_parallel_seed",
        ),
    ),
    ranks=1,
    stock_error=r"Exception: seed 2725 already exists",
)
