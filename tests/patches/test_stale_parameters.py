"""Steps, forwards and gathers in odd orders."""

from __future__ import annotations

import contextlib

import pytest
from ranks import agree, built, groups, on_ranks

pytestmark = pytest.mark.full


def overlapped(*only: str, **layout):
    return built(only, **{"overlap_param_gather": True, **layout})


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
