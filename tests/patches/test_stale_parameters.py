"""Steps, forwards and gathers in odd orders; ordinary training keeps its collectives."""

from __future__ import annotations

import contextlib

import pytest
from ranks import VIRTUAL, agree, built, groups, on_ranks, tiered

import megatron_idempotent

pytestmark = pytest.mark.full

ALL = ("params-stale-after-step", "pending-gather-dropped", "start-param-sync-reentry")


def overlapped(*only: str, **layout):
    return built(only, **{"overlap_param_gather": True, **layout})


def collectives_of_training(only: tuple[str, ...], layout: dict, iterations: int) -> list[str]:
    """Runs on a rank: every collective that an ordinary training issues, in order.

    With the hooks as `train()` has them: off in the first iteration, on from the second.
    """
    from megatron_idempotent.proof.cpu.probes import watching_collectives

    issued: list[str] = []
    model = overlapped(*only, **layout)
    chunks = model.chunks if layout.get("overlap_param_gather", True) else []
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=False)
    put_aside, model.config.param_sync_func = model.config.param_sync_func, None
    with watching_collectives(lambda name, _: issued.append(name)):
        for iteration in range(iterations):
            model.forward_backward(4, data_seed=iteration)
            issued.append("step")
            model.step()
            if iteration == 0 and chunks:
                for chunk in chunks:
                    chunk.enable_forward_pre_hook()
                model.config.param_sync_func = put_aside
    for chunk in chunks:
        # How much of a gather in flight has arrived would depend on the machine.
        chunk.start_param_sync(force_sync=True)
    return [*issued, repr(float(model.parameters().double().sum()))]


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


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ("overlap", "experts", "gather in the step")))
def test_ordinary_training_issues_the_same_collectives_and_computes_the_same_bits(
    layout, megatron_ranks
):
    ranks, options = LAYOUTS[layout]
    stock = megatron_ranks(ranks, collectives_of_training, (), options, 3)
    assert megatron_ranks(ranks, collectives_of_training, ALL, options, 3) == stock
    assert all(len(issued) > 10 for issued in stock)


@on_ranks(2)
def test_a_step_waits_for_a_gather_of_what_it_writes():
    """A forward leaves it so that did not use every bucket."""
    model = overlapped("params-stale-after-step")
    model.forward_backward(2, data_seed=0)
    for chunk in model.chunks:
        chunk.start_param_sync()
    model.step()
    assert all(group.param_gather_handle is None for group in groups(model))
    model.forward_backward(1, data_seed=1, forward_only=True)
    assert agree(model)


@pytest.mark.parametrize("applied", [True, False])
@on_ranks(2)
def test_a_forward_after_gradients_finished_under_a_gather_runs(applied):
    """Upstream declares the gathers outdated while one of them runs."""
    model = overlapped(*(["start-param-sync-reentry"] if applied else []))
    for chunk in model.chunks:
        chunk.start_param_sync()
    for group in groups(model):
        group.param_gather_dispatched = False  # as finish_grad_sync does
    with contextlib.nullcontext() if applied else pytest.raises(AssertionError):
        assert len(model.forward_backward(1, data_seed=1, forward_only=True)) == 1


@on_ranks(2)
def test_with_the_hooks_off_every_step_reaches_the_next_forward():
    def losses(overlap: bool, *only: str) -> list:
        """The losses of a caller who disabled the hooks and steps by itself."""
        with megatron_idempotent.patched(only):
            model = overlapped(overlap_param_gather=overlap)
            found = []
            for seed in range(4):
                found += model.forward_backward(2, data_seed=seed)
                model.step()
                if overlap and seed == 0:
                    for chunk in model.chunks:
                        chunk.disable_forward_pre_hook()
            return found

    want = losses(False)
    assert losses(True, "pending-gather-dropped") == want
    assert losses(True) != want


@pytest.mark.parametrize("updated", [True, False])
@on_ranks(2)
def test_disabling_without_sync_gathers_only_what_an_update_left(updated):
    model = overlapped("pending-gather-dropped")
    if updated:
        model.train_step(2, data_seed=0)
    before = [group.param_gather_dispatched for group in groups(model)]
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook(param_sync=False)
    after = [group.param_gather_dispatched for group in groups(model)]
    gathered = sum(now and not then for then, now in zip(before, after, strict=True))
    assert gathered > 1 if updated else gathered == 0
