"""Steps, forwards and gathers in odd orders; ordinary training keeps its collectives."""

from __future__ import annotations

import pytest
from benches import agree
from layouts import some_of

from megatron_idempotent.proof.cpu import RankError

ALL = ("params-stale-after-step", "pending-gather-dropped", "start-param-sync-reentry")


def built(only, **layout):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=list(only))
    return tiny.build(**{"overlap_param_gather": True, **layout})


def collectives_of_training(only: tuple[str, ...], layout: dict, iterations: int) -> list[str]:
    """Runs on a rank: every collective that an ordinary training issues, in order.

    With the hooks as `train()` has them: off in the first iteration, on from the second.
    """
    from megatron_idempotent.proof.cpu.probes import watching_collectives

    issued: list[str] = []
    model = built(only, **layout)
    if layout.get("overlap_param_gather", True):
        for chunk in model.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
    put_aside, model.config.param_sync_func = model.config.param_sync_func, None
    with watching_collectives(lambda name, _: issued.append(name)):
        for iteration in range(iterations):
            model.forward_backward(4, data_seed=iteration)
            issued.append("step")
            model.step()
            if iteration == 0 and layout.get("overlap_param_gather", True):
                for chunk in model.chunks:
                    chunk.enable_forward_pre_hook()
                model.config.param_sync_func = put_aside
    if layout.get("overlap_param_gather", True):
        for chunk in model.chunks:
            # How much of a gather in flight has arrived would depend on the machine.
            chunk.start_param_sync(force_sync=True)
    return [*issued, repr(float(model.parameters().double().sum()))]


VIRTUAL = {"pp": 2, "vpp": 2, "layers_per_stage": 1}
LAYOUTS = {
    "overlap": (2, {}),
    "no overlap": (2, {"overlap_param_gather": False}),
    "experts": (2, {"experts": 2}),
    "virtual-stages": (4, VIRTUAL),
    "aligned": (4, {**VIRTUAL, "align": True}),
    "gather in the step": (
        4,
        {**VIRTUAL, "optimizer_overrides": {"overlap_param_gather_with_optimizer_step": True}},
    ),
}


@pytest.mark.parametrize("layout", some_of(LAYOUTS, "overlap", "experts", "gather in the step"))
def test_ordinary_training_issues_the_same_collectives_and_computes_the_same_bits(
    layout, megatron_ranks
):
    ranks, options = LAYOUTS[layout]
    stock = megatron_ranks(ranks, collectives_of_training, (), options, 3)
    assert megatron_ranks(ranks, collectives_of_training, ALL, options, 3) == stock
    assert all(len(issued) > 10 for issued in stock)


def a_gather_in_flight_at_the_step(only: tuple[str, ...]) -> tuple[int, bool]:
    """Runs on a rank: as a forward leaves it that did not use every bucket."""
    model = built(only)
    model.forward_backward(2, data_seed=0)
    for chunk in model.chunks:
        chunk.start_param_sync()
    model.step()
    in_flight = sum(
        group.param_gather_handle is not None for c in model.chunks for group in c.bucket_groups
    )
    model.forward_backward(1, data_seed=1, forward_only=True)
    return in_flight, agree(model)


def test_a_step_waits_for_a_gather_of_what_it_writes(megatron_ranks):
    only = ["params-stale-after-step"]
    assert megatron_ranks(2, a_gather_in_flight_at_the_step, only) == [(0, True)] * 2


def a_gather_in_flight_when_the_gradients_are_finished(only: tuple[str, ...]) -> list[float]:
    """Runs on a rank: upstream declares the gathers outdated while one of them runs."""
    model = built(only)
    for chunk in model.chunks:
        chunk.start_param_sync()
        for group in chunk.bucket_groups:
            group.param_gather_dispatched = False  # as finish_grad_sync does
    return model.forward_backward(1, data_seed=1, forward_only=True)


def test_a_forward_after_gradients_finished_under_a_gather_runs(megatron_ranks):
    only = ["start-param-sync-reentry"]
    losses = megatron_ranks(2, a_gather_in_flight_when_the_gradients_are_finished, only)
    assert all(len(loss) == 1 for loss in losses)
    with pytest.raises(RankError, match="AssertionError"):
        megatron_ranks(2, a_gather_in_flight_when_the_gradients_are_finished, [])


def steps_with_the_hooks_off(only: tuple[str, ...], overlap: bool) -> list:
    """Runs on a rank: the losses of a caller who disabled the hooks and steps by itself."""
    model = built(only, overlap_param_gather=overlap)
    losses = []
    for seed in range(4):
        losses += model.forward_backward(2, data_seed=seed)
        model.step()
        if overlap and seed == 0:
            for chunk in model.chunks:
                chunk.disable_forward_pre_hook()
    return losses


def test_with_the_hooks_off_every_step_reaches_the_next_forward(megatron_ranks):
    want = megatron_ranks(2, steps_with_the_hooks_off, [], False)
    assert megatron_ranks(2, steps_with_the_hooks_off, ["pending-gather-dropped"], True) == want
    assert megatron_ranks(2, steps_with_the_hooks_off, [], True) != want


def disabled_without_sync(updated: bool) -> int:
    """Runs on a rank: number of gathers that `disable_forward_pre_hook(param_sync=False)`
    dispatches."""
    model = built(["pending-gather-dropped"])
    if updated:
        model.forward_backward(2, data_seed=0)
        model.step()
    (chunk,) = model.chunks
    before = [group.param_gather_dispatched for group in chunk.bucket_groups]
    chunk.disable_forward_pre_hook(param_sync=False)
    after = [group.param_gather_dispatched for group in chunk.bucket_groups]
    return sum(now and not then for then, now in zip(before, after, strict=True))


def test_disabling_without_sync_gathers_only_what_an_update_left(megatron_ranks):
    assert all(count > 1 for count in megatron_ranks(2, disabled_without_sync, True))
    assert megatron_ranks(2, disabled_without_sync, False) == [0, 0]
