"""The output layer's deferred gradient after aborts, and in a step of several calls."""

from __future__ import annotations

import pytest
from abort_sites import Interrupted
from megatron_idempotent.patches import _controls, _deferred_embedding
from ranks import built, digest, on_ranks, same

import megatron_idempotent
from megatron_idempotent.megatron import ddp, schedules
from megatron_idempotent.proof.cpu import RankError, tiny

pytestmark = pytest.mark.full


def deferring(*, applied: bool = True, **options):
    """A bench on two stages whose embedding's gradient is deferred."""
    if applied:
        megatron_idempotent.apply()
    return _deferred_embedding.build(**options)


@on_ranks(2)
def test_a_window_that_raises_leaves_only_what_was_kept_before_it():
    from megatron_idempotent.patches.deferred_embedding_leftovers import schedule

    model = deferring(overlap_grad_reduce=False)
    kept = schedules.buffers(model.chunks)
    if kept is None:  # the first stage
        return

    def upstream(fail, **_):
        kept[0].append("activation")
        if fail:
            raise Interrupted
        kept[1].append("gradient")

    def call(fail, forward_only=False):
        schedule(upstream, fail, model=model.chunks, forward_only=forward_only)

    with pytest.raises(Interrupted):
        call(True)
    assert (len(kept[0]), len(kept[1])) == (0, 0)
    model.config.finalize_model_grads_func = None  # the caller drains, later
    call(False)
    call(False)
    with pytest.raises(Interrupted):
        call(True)
    call(False, forward_only=True)
    assert (len(kept[0]), len(kept[1])) == (2, 2)


@on_ranks(2)
def test_a_chained_step_computes_the_deferred_gradient_to_the_bit():
    model = deferring(overlap_grad_reduce=False)
    model.forward_backward(4, data_seed=0)
    want = model.gradients()
    model.chunks[0].zero_grad_buffer()
    data = tiny.microbatches(0)
    with megatron_idempotent.window.accumulation_window(model.chunks, 4):
        for size in (1, 2, 1):
            model.schedule(data, size)
    assert same(model.gradients(), want)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@on_ranks(4)
def test_overlapped_reductions_wait_for_the_deferred_gradient(distributed_optimizer):
    """The gradients are those without deferring, and reduced once."""
    options = {"distributed_optimizer": distributed_optimizer}
    models = [built(pp=2, **options), deferring(**options)]
    for data_seed, microbatches in enumerate((2, 2, 1, 3)):
        for model in models:
            model.forward_backward(microbatches, data_seed=data_seed)
            groups = ddp.bucket_groups(model.chunks[0])
            assert all(group.grad_reduce_handle is None for group in groups)
        assert same(*models)


@on_ranks(2)
def test_finishing_without_the_deferred_gradient_is_refused():
    """It is so in and after the first window; the next one is right."""
    import torch

    plain, model = built(pp=2), deferring()
    (chunk,) = model.chunks
    for _ in range(2):
        finalize, model.config.finalize_model_grads_func = (
            model.config.finalize_model_grads_func,
            None,
        )
        model.forward_backward(2, data_seed=0)
        model.config.finalize_model_grads_func = finalize
        if torch.distributed.get_rank() == 1:  # the last stage
            with pytest.raises(RuntimeError):
                chunk.finish_grad_sync()
        else:
            chunk.finish_grad_sync()
        for each in (plain, model):
            each.forward_backward(2, data_seed=1)
        assert same(plain, model)


def computed_by_the_caller(applied: bool) -> list[str]:
    """Runs on a rank: gradients of steps that the caller finalizes; with overlap, a first one's."""
    import inspect

    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import finish_embedding_wgrad_compute

    takes = len(inspect.signature(finish_embedding_wgrad_compute).parameters)
    found = []
    for overlap, steps in ((False, ((2,), (2, 3), (3,))), (True, ((3,),))):
        plain = built(applied=applied, pp=2, overlap_grad_reduce=overlap)
        other = deferring(applied=applied, overlap_grad_reduce=overlap)
        if overlap and not _controls.learns(plain):
            continue  # then a first window misses the gradient, too
        for number, calls in enumerate(steps):
            for model in (plain, other):
                model.config.finalize_model_grads_func = None
                model.chunks[0].zero_grad_buffer()
                for microbatches in calls:
                    model.forward_backward(microbatches, data_seed=number, zero_first=False)
                    if model is other and schedules.buffers(model.chunks):
                        # From 0.14 on it is told the last stage and the tensor-parallel group.
                        rest = (True, parallel_state.get_tensor_model_parallel_group())
                        finish_embedding_wgrad_compute(
                            model.config, model.chunks[0].module, *rest[: takes - 2]
                        )
                finalize_model_grads(model.chunks)
            assert same(plain, other)
            found.append(digest(other.gradients()))
    return found


def test_a_deferred_gradient_that_the_caller_computes_is_no_false_alarm(megatron_ranks):
    stock, patched = (megatron_ranks(2, computed_by_the_caller, on) for on in (False, True))
    assert stock == patched


@on_ranks(4)
def test_a_carried_failure_leaves_no_peer_waiting_for_the_deferred_gradient():
    import torch.distributed as dist
    from guard_failures import failing, guard

    model = deferring()
    guard(model)
    for site in ("layer@1", "backward@0", "loss"):
        for data_seed in range(2):
            model.forward_backward(2, data_seed=data_seed)
        want = model.gradients()
        with (
            failing(model, site, 1, dist.get_rank() == 3),
            pytest.raises(megatron_idempotent.WindowAborted),
        ):
            model.forward_backward(2, data_seed=2)
        model.forward_backward(2, data_seed=1)
        assert same(model.gradients(), want), site


def frozen(applied: bool) -> None:
    """Runs on a rank: a window of a frozen output layer that is to defer."""

    def freeze(module):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("output_layer" not in name)

    deferring(applied=applied, before_ddp=freeze).forward_backward(1, data_seed=0)


@pytest.mark.parametrize("applied", [False, True])
def test_a_frozen_output_layer_that_is_to_defer_meets_upstreams_error(megatron_ranks, applied):
    with pytest.raises(RankError, match="grad_output_buffer"):
        megatron_ranks(2, frozen, applied)
