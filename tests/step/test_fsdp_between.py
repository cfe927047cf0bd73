"""An exception inside of FSDP2, between two things that it takes to happen together."""

from __future__ import annotations


def between_parameters() -> None:
    """Runs on a rank: one parameter of a group changes its state, and the next one raises
    instead."""
    from fsdp_bench import Tripped, build, same, state, step_of
    from scenario import TokenLoss, data, raised_by, split_step
    from torch import distributed

    from megatron_idempotent import WindowAborted
    from megatron_idempotent.step.fsdp_run import groups_of

    batch = data(1, 8, distributed.get_rank())
    loss = TokenLoss()
    parts = build()
    step = step_of(*parts)
    for _ in range(2):
        split_step(step, loss, batch, [1, 3])
    expected = state(*parts)

    parts = build()
    step = step_of(*parts)
    split_step(step, loss, batch, [1, 3])
    (group,) = groups_of(parts[0].blocks[0]._get_fsdp_state())

    def trip() -> None:
        raise Tripped("between")

    group.fsdp_params[1].to_unsharded = trip
    told = raised_by(split_step, step, loss, batch, [1, 3])
    del group.fsdp_params[1].to_unsharded
    assert isinstance(told, WindowAborted)
    step.abort()
    split_step(step, loss, batch, [1, 3])
    assert same(state(*parts), expected)


def test_parameters_of_a_group_that_differ_are_put_back(megatron_ranks):
    megatron_ranks(2, between_parameters)


def before_the_norm() -> tuple[str, bool]:
    """Runs on a rank: one rank raises where the other sums norms, in the group of an equal mesh."""
    import time

    import torch
    from fsdp_bench import Tripped, build, step_of
    from scenario import ROWS, TokenLoss, data, raised_by, split_step

    rank = torch.distributed.get_rank()
    batch = data(1, 4 * ROWS, rank)
    split_step(step_of(*build()), TokenLoss(), batch, [4])
    step = step_of(*build(), deadline_s=4.0)
    split_step(step, TokenLoss(), batch, [4])

    def trip() -> None:
        raise Tripped("norm")

    if rank == 1:
        step._backend._clipped = trip
    start = time.monotonic()
    told = raised_by(split_step, step, TokenLoss(), batch, [4])
    return type(told).__name__, time.monotonic() - start < 20


def test_a_rank_that_never_sums_norms_is_not_waited_for(megatron_ranks):
    assert megatron_ranks(2, before_the_norm) == [("SessionPoisoned", True)] * 2
