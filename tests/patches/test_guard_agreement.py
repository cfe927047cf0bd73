"""Costs of the guard, what it finds before the reduction, and what it refuses."""

from __future__ import annotations

import collections
import functools
import pickle

import pytest
from guard_failures import Broken, build, failing, guard, unguard

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather_object",
    "new_group",
    "reduce_scatter_tensor",
)


def _counted(monkeypatch, counts):
    import torch.distributed as dist

    for name in COLLECTIVES:
        original = getattr(dist, name)

        def call(*args, name=name, original=original, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(dist, name, functools.wraps(original)(call))


def _cost(layout):
    """Collectives and results of the same window, unguarded and guarded."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    model = build(**layout)
    guard(model)
    model.forward_backward(2, data_seed=0)
    steps = schedules.forward_step, schedules.backward_step
    seen = []
    for change in (unguard, functools.partial(guard, model)):
        change()
        counts = collections.Counter()
        with pytest.MonkeyPatch.context() as patch:
            _counted(patch, counts)
            losses = model.forward_backward(2, data_seed=1)
        seen.append((counts, losses, model.gradients()))
        assert (schedules.forward_step, schedules.backward_step) == steps
    (plain, losses, gradients), (guarded, same_losses, same_gradients) = seen
    assert losses == same_losses
    assert torch.equal(gradients, same_gradients)
    return dict(guarded - plain), dict(plain - guarded)


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}], ids=["dp", "pp", "tp"])
def test_a_guarded_window_costs_one_collective_and_changes_no_bit(layout, megatron_ranks):
    assert megatron_ranks(2, _cost, layout) == [({"all_reduce": 1}, {})] * 2


def _agree():
    import torch.distributed as dist

    from megatron_idempotent import WindowAborted
    from megatron_idempotent.window import agree

    agree()
    error = Broken("cannot pack") if dist.get_rank() == 1 else None
    with pytest.raises(WindowAborted, match="rank 1: Broken: cannot pack") as aborted:
        agree(error)
    assert aborted.value.__cause__ is error
    again = pickle.loads(pickle.dumps(aborted.value))
    assert (again.failures, str(again)) == ({1: "Broken: cannot pack"}, str(aborted.value))
    agree()


def test_agree_raises_on_all_ranks_where_one_brings_an_error(megatron_ranks):
    megatron_ranks(2, _agree)


def _nan(overlap, windows_before):
    import torch
    import torch.distributed as dist

    from megatron_idempotent import WindowAborted

    model = build(overlap_grad_reduce=overlap, ddp_overrides={"check_for_nan_in_grad": True})
    guard(model)
    for _ in range(windows_before):
        model.forward_backward(2, data_seed=1)
    bad = dist.get_rank() == 1
    model.on_microbatch = lambda i, loss: loss * float("nan") if bad and loss is not None else loss
    with pytest.raises(WindowAborted) as aborted:
        model.forward_backward(2, data_seed=2)
    model.on_microbatch = None
    assert list(aborted.value.failures) == [1]
    model.forward_backward(2, data_seed=1)
    expected = build(overlap_grad_reduce=overlap)
    unguard()
    expected.forward_backward(2, data_seed=1)
    assert torch.equal(model.gradients(), expected.gradients())
    return aborted.value.failures[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows_before", [0, 2])
def test_a_nan_that_upstream_finds_on_one_rank_is_raised_on_all(
    overlap, windows_before, megatron_ranks
):
    told = megatron_ranks(2, _nan, overlap, windows_before)
    assert told[0] == told[1]
    assert "found NaN in local grad norm" in told[0]


def _forward_only():
    import torch
    import torch.distributed as dist

    from megatron_idempotent import WindowAborted

    model = build(pp=2)
    guard(model)
    model.forward_backward(3, data_seed=1)
    pending = model.gradients()
    losses = model.forward_backward(3, data_seed=2, forward_only=True)
    here = dist.get_rank() == 0
    with failing(model, "layer@1", 1, here), pytest.raises(WindowAborted):
        model.forward_backward(3, data_seed=2, forward_only=True)
    assert model.forward_backward(3, data_seed=2, forward_only=True) == losses
    assert torch.equal(model.gradients(), pending)


def test_a_failed_forward_only_pass_leaves_the_pipeline_clean_and_gradients_alone(megatron_ranks):
    megatron_ranks(2, _forward_only)


def _refused():
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.window import guarded_window

    model = build()
    with pytest.raises(ValueError, match=r"found <function _refused.*get_forward_backward_func"):
        guarded_window(_refused, model=model.chunks)
    with pytest.raises(ValueError, match=r"got GPTModel to train.*DistributedDataParallel"):
        guarded_window(get_forward_backward_func(), model=[model.chunks[0].module])


def test_a_foreign_schedule_and_a_bare_model_are_refused(megatron_ranks):
    megatron_ranks(1, _refused)
