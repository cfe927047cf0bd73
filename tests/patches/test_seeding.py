"""Stages of a pipeline get seeds 100 apart, once, whether Megatron or a caller adds the offset."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

import megatron_idempotent


def handed_on(seeds: tuple[int, ...], *, pp: int, applied: bool = True) -> tuple[int, int]:
    """Runs on a rank: pipeline rank, and the default generator's seed after seeding with
    seeds[rank]."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    if applied:
        megatron_idempotent.apply(only=["pipeline-seed-offset"])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    rank = torch.distributed.get_rank()
    random.model_parallel_cuda_manual_seed(seeds[rank])
    return parallel_state.get_pipeline_model_parallel_rank(), torch.initial_seed()


APART = [(0, 42), (1, 142), (2, 242), (3, 342)]


@pytest.mark.parametrize(
    ("seeds", "how", "expected"),
    [
        pytest.param((42, 42, 42, 42), {"pp": 4}, APART, id="one seed"),
        pytest.param((42, 142, 242, 342), {"pp": 4}, APART, id="offset by the caller"),
        pytest.param(
            (42, 42, 42, 42), {"pp": 2}, [(0, 42), (0, 42), (1, 142), (1, 142)], id="replicas"
        ),
        pytest.param((42, 42), {"pp": 1}, [(0, 42), (0, 42)], id="no pipeline"),
        pytest.param((42, 42), {"pp": 2, "applied": False}, [(0, 42), (1, 42)], id="stock"),
    ],
)
def test_stages_get_seeds_100_apart_once(seeds, how, expected, megatron_ranks):
    assert megatron_ranks(len(seeds), handed_on, seeds, **how) == expected


@on_ranks(1)
def test_seed_all_refuses_what_is_no_seed_and_wants_model_parallelism_to_be_up():
    for seed in (-1, 1.5, True, None):
        with pytest.raises((TypeError, ValueError), match=repr(seed)):
            megatron_idempotent.seed_all(seed)
    with pytest.raises(RuntimeError, match="seed_all"):
        megatron_idempotent.seed_all(42)
