"""A gradient scaler on FSDP2: overflows skip the step, failures leave the scale as it was."""

from __future__ import annotations

import pytest


class _Failed(Exception):
    pass


def scaled(layout):
    """Runs on a rank: three steps with a scaler, with an overflow and two failures between."""
    import torch
    from fsdp_bench import CLIP, Trip, build, replica_of, step_of
    from fsdp_bench import parameters as whole
    from scenario import TokenLoss, data, split_step

    from megatron_idempotent import WindowAborted

    batch = data(1, 4, replica_of(layout))
    first_replica = replica_of(layout) == 0
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def setting(**options):
        parts = build(layout)
        for block in parts[0].blocks:
            block.dropout.p = 0.0
        clip = None if layout == "tensor parallel" else CLIP
        return parts, step_of(*parts, clip_grad=clip, **options)

    def one_step(step, loss=None):
        return split_step(step, loss or TokenLoss(), batch, [1, 1])

    class Overflow(TokenLoss):
        def __call__(self, output, microbatch):
            return super().__call__(output * (torch.inf if first_replica else 1.0), microbatch)

    parts, step = setting()
    want = [(one_step(step).grad_norm, whole(parts[0])) for _ in range(3)]
    parts, step = setting(grad_scaler=scaler, undo=True)
    trip = Trip(*parts)
    got = [(one_step(step).grad_norm, whole(parts[0]))]
    result = one_step(step, Overflow())
    assert (result.updated, result.grad_norm) == (False, None)
    assert "overflowed" in result.skipped
    assert torch.equal(whole(parts[0]), got[0][1])
    scales = scaler.state_dict()
    assert scales["scale"] == 512.0
    # Where the scaler has looked at gradients and not been updated, and where it has.
    for place in ("before the update", "after the schedule"):
        trip.passing = lambda name, place=place: _raise_at(name, place)
        with pytest.raises(WindowAborted):
            one_step(step)
        step.abort()
        assert scaler.state_dict() == scales
    trip.passing = lambda name: None
    got += [(one_step(step).grad_norm, whole(parts[0])) for _ in range(2)]
    assert scaler.get_scale() == 1024.0  # two steps without an overflow, not more
    return [a == b and torch.equal(c, d) for (a, c), (b, d) in zip(got, want, strict=True)]


def _raise_at(name, place):
    if name == place:
        raise _Failed(name)


@pytest.mark.parametrize(("layout", "ranks"), [("shard", 2), ("tensor parallel", 4)])
def test_a_scaled_step_is_the_step_and_an_overflow_is_none(megatron_ranks, layout, ranks):
    # Scales are powers of two, by which nothing is rounded.
    assert megatron_ranks(ranks, scaled, layout) == [[True] * 3] * ranks


def scaler_that_is_off():
    """Runs on a rank: a scaler that is not enabled changes nothing, and can be aborted with."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from scenario import TokenLoss, data, split_step

    batch = data(1, 2, torch.distributed.get_rank())

    def run(**options):
        parts = build()
        step = step_of(*parts, **options)
        step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=2)
        step.abort()
        split_step(step, TokenLoss(), batch, [1])
        return state(*parts)

    return same(run(grad_scaler=torch.amp.GradScaler("cpu", enabled=False)), run())


def test_a_scaler_that_is_off_changes_nothing(megatron_ranks):
    assert megatron_ranks(2, scaler_that_is_off) == [True, True]
