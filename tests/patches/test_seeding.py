"""Stages of a pipeline get seeds 100 apart, once, whether Megatron or a caller adds the offset."""

from __future__ import annotations

import pytest

from megatron_idempotent.proof.cpu import RankError


def handed_on(seeds: tuple[int, ...], *, pp: int, applied: bool = True) -> tuple[int, int]:
    """Runs on a rank: pipeline rank, and the default generator's seed after seeding with
    seeds[rank]."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    import megatron_idempotent

    if applied:
        megatron_idempotent.apply(only=["pipeline-seed-offset"])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    rank = torch.distributed.get_rank()
    random.model_parallel_cuda_manual_seed(seeds[rank])
    return parallel_state.get_pipeline_model_parallel_rank(), torch.initial_seed()


def test_stages_given_one_seed_get_seeds_100_apart(megatron_ranks):
    results = megatron_ranks(4, handed_on, (42, 42, 42, 42), pp=4)
    assert results == [(0, 42), (1, 142), (2, 242), (3, 342)]


def test_a_caller_that_offsets_by_itself_is_not_offset_twice(megatron_ranks):
    results = megatron_ranks(4, handed_on, (42, 142, 242, 342), pp=4)
    assert results == [(0, 42), (1, 142), (2, 242), (3, 342)]


def test_data_parallel_replicas_of_a_stage_get_the_same_seed(megatron_ranks):
    results = megatron_ranks(4, handed_on, (42, 42, 42, 42), pp=2)
    assert results == [(0, 42), (0, 42), (1, 142), (1, 142)]


def test_without_pipeline_parallelism_the_seed_is_left_alone(megatron_ranks):
    assert megatron_ranks(2, handed_on, (42, 42), pp=1) == [(0, 42), (0, 42)]


def test_stock_megatron_seeds_all_stages_alike(megatron_ranks):
    results = megatron_ranks(2, handed_on, (42, 42), pp=2, applied=False)
    assert results == [(0, 42), (1, 42)]


def seeded_by_seed_all(*, applied: bool) -> tuple[int, int, float, float]:
    """Runs on a rank: what `seed_all` returns, torch's seed, and a draw of Python and of NumPy."""
    import random

    import numpy
    import torch
    from megatron.core import parallel_state

    import megatron_idempotent

    if applied:
        megatron_idempotent.apply()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    given = megatron_idempotent.seed_all(42)
    return given, torch.initial_seed(), random.random(), float(numpy.random.rand())


def test_seed_all_offsets_once_with_and_without_the_patch(megatron_ranks):
    with_patch = megatron_ranks(2, seeded_by_seed_all, applied=True)
    without = megatron_ranks(2, seeded_by_seed_all, applied=False)
    assert with_patch == without
    assert [rank[:2] for rank in with_patch] == [(42, 42), (142, 142)]
    first, second = with_patch
    assert first[2:] != second[2:]


def seed_all_with(seed: object) -> None:
    """Runs on a rank: `seed_all` without model parallelism."""
    import megatron_idempotent

    megatron_idempotent.seed_all(seed)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_seed_all_refuses_what_is_no_seed(seed, megatron_ranks):
    with pytest.raises(RankError, match=rf"takes a non-negative int, got {seed!r}"):
        megatron_ranks(1, seed_all_with, seed)


def test_seed_all_wants_model_parallelism_to_be_up(megatron_ranks):
    with pytest.raises(RankError, match="initialise model parallelism first"):
        megatron_ranks(1, seed_all_with, 42)
