"""The output layer's deferred gradient after aborts, and in a step of several calls."""

from __future__ import annotations

import pytest

from megatron_idempotent.proof.cpu import RankError


def behind_an_abort() -> list[tuple[int, int]]:
    """Runs on a rank: how much the two lists hold after a window that raises, and a whole one."""
    from megatron_idempotent.patches import _deferred_embedding
    from megatron_idempotent.patches.deferred_embedding_leftovers import schedule

    import megatron_idempotent
    from megatron_idempotent.megatron import schedules

    megatron_idempotent.apply()
    model = _deferred_embedding.build(overlap_grad_reduce=False)
    kept = schedules.buffers(model.chunks)
    if kept is None:
        return []

    def upstream(fail, **_):
        kept[0].append("activation")
        if fail:
            raise OSError("no data")
        kept[1].append("gradient")

    found = []
    with pytest.raises(OSError, match="no data"):
        schedule(upstream, True, model=model.chunks, forward_only=False)
    found.append((len(kept[0]), len(kept[1])))
    model.config.finalize_model_grads_func = None  # the caller drains, later
    for _ in range(2):
        schedule(upstream, False, model=model.chunks, forward_only=False)
    with pytest.raises(OSError, match="no data"):
        schedule(upstream, True, model=model.chunks, forward_only=False)
    schedule(upstream, False, model=model.chunks, forward_only=True)
    found.append((len(kept[0]), len(kept[1])))
    return found


def chained() -> bool:
    """Runs on a rank: calls of one microbatch in a window, and the step in one call."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron_idempotent.patches import _deferred_embedding

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = _deferred_embedding.build(overlap_grad_reduce=False)
    model.forward_backward(4, data_seed=0)
    want = model.gradients()
    model.chunks[0].zero_grad_buffer()
    data = tiny.microbatches(0)
    with megatron_idempotent.window.accumulation_window(model.chunks, 4):
        for size in (1, 2, 1):
            get_forward_backward_func()(
                forward_step_func=model._forward_step([]),
                data_iterator=data,
                model=model.chunks,
                num_microbatches=size,
                seq_length=tiny.SEQUENCE,
                micro_batch_size=tiny.BATCH,
                forward_only=False,
            )
    return torch.equal(model.gradients(), want)


def test_a_window_that_raises_leaves_only_what_was_kept_before_it(megatron_ranks):
    _, last = megatron_ranks(2, behind_an_abort)
    assert last == [(0, 0), (2, 2)]


def test_a_chained_step_computes_the_deferred_gradient_to_the_bit(megatron_ranks):
    assert megatron_ranks(2, chained) == [True, True]


def overlapped(options: dict) -> list[bool]:
    """Runs on a rank: windows whose gradients are those without deferring, and reduced once."""
    import torch
    from megatron_idempotent.patches import _deferred_embedding

    import megatron_idempotent
    from megatron_idempotent.megatron import ddp
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(strict=True)
    plain, deferring = tiny.build(pp=2, **options), _deferred_embedding.build(**options)
    found = []
    for data_seed, microbatches in enumerate((2, 2, 1, 3)):
        versions = []
        for model in (plain, deferring):
            model.forward_backward(microbatches, data_seed=data_seed)
            groups = ddp.bucket_groups(model.chunks[0])
            versions.append([group.grad_reduce_handle is None for group in groups])
        same = torch.equal(plain.gradients(), deferring.gradients())
        found.append(same and all(map(all, versions)))
    return found


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_overlapped_reductions_wait_for_the_deferred_gradient(
    distributed_optimizer, megatron_ranks
):
    options = {"distributed_optimizer": distributed_optimizer}
    assert megatron_ranks(4, overlapped, options) == [[True] * 4] * 4


def nobody_computes_it() -> list[str]:
    """Runs on a rank: what finishing says in and after the first window; then a right window."""
    import torch
    from megatron_idempotent.patches import _deferred_embedding

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(strict=True)
    plain, model = tiny.build(pp=2), _deferred_embedding.build()
    (chunk,) = model.chunks
    said = []
    for _ in range(2):
        finalize, model.config.finalize_model_grads_func = (
            model.config.finalize_model_grads_func,
            None,
        )
        model.forward_backward(2, data_seed=0)
        model.config.finalize_model_grads_func = finalize
        try:
            chunk.finish_grad_sync()
        except RuntimeError as error:
            said.append(str(error))
        for each in (plain, model):
            each.forward_backward(2, data_seed=1)
        assert torch.equal(plain.gradients(), model.gradients())
    return said


def test_finishing_without_the_deferred_gradient_is_refused(megatron_ranks):
    first_stage, last_stage = megatron_ranks(2, nobody_computes_it)
    assert first_stage == []
    assert ["was not computed" in text for text in last_stage] == [True, True]


def computed_by_the_caller(applied: bool) -> list[bytes]:
    """Runs on a rank: gradients of steps that the caller finalizes; with overlap, a first one's."""
    import inspect

    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import finish_embedding_wgrad_compute
    from megatron_idempotent.patches import _deferred_embedding, _neighbours

    import megatron_idempotent
    from megatron_idempotent.megatron import schedules
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(strict=True)
    takes = len(inspect.signature(finish_embedding_wgrad_compute).parameters)
    found = []
    for overlap, steps in ((False, ((2,), (2, 3), (3,))), (True, ((3,),))):
        plain = tiny.build(pp=2, overlap_grad_reduce=overlap)
        deferring = _deferred_embedding.build(overlap_grad_reduce=overlap)
        if overlap and not _neighbours.learns(plain):
            continue  # then a first window misses the gradient, too
        for number, calls in enumerate(steps):
            for model in (plain, deferring):
                model.config.finalize_model_grads_func = None
                model.chunks[0].zero_grad_buffer()
                for microbatches in calls:
                    model.forward_backward(microbatches, data_seed=number, zero_first=False)
                    if model is deferring and schedules.buffers(model.chunks):
                        # From 0.14 on it is told the last stage and the tensor-parallel group.
                        rest = (True, parallel_state.get_tensor_model_parallel_group())
                        finish_embedding_wgrad_compute(
                            model.config, model.chunks[0].module, *rest[: takes - 2]
                        )
                finalize_model_grads(model.chunks)
            assert torch.equal(plain.gradients(), deferring.gradients())
            found.append(deferring.gradients().numpy().tobytes())
    return found


def test_a_deferred_gradient_that_the_caller_computes_is_no_false_alarm(megatron_ranks):
    stock, patched = (megatron_ranks(2, computed_by_the_caller, on) for on in (False, True))
    assert stock == patched


def carried(site: str) -> bool:
    """Runs on a rank: a window that one rank's failure aborted, and the one after it."""
    import torch
    import torch.distributed as dist
    from guard_failures import failing, guard
    from megatron_idempotent.patches import _deferred_embedding

    import megatron_idempotent

    megatron_idempotent.apply(strict=True)
    model = _deferred_embedding.build()
    guard(model)
    for data_seed in range(2):
        model.forward_backward(2, data_seed=data_seed)
    want = model.gradients()
    with (
        failing(model, site, 1, dist.get_rank() == 3),
        pytest.raises(megatron_idempotent.WindowAborted),
    ):
        model.forward_backward(2, data_seed=2)
    model.forward_backward(2, data_seed=1)
    return torch.equal(model.gradients(), want)


@pytest.mark.parametrize("site", ["layer@1", "backward@0", "loss"])
def test_a_carried_failure_leaves_no_peer_waiting_for_the_deferred_gradient(site, megatron_ranks):
    assert megatron_ranks(4, carried, site) == [True] * 4


def frozen(applied: bool) -> None:
    """Runs on a rank: a window of a frozen output layer that is to defer."""
    from megatron_idempotent.patches import _deferred_embedding

    import megatron_idempotent

    def freeze(module):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("output_layer" not in name)

    if applied:
        megatron_idempotent.apply()
    _deferred_embedding.build(before_ddp=freeze).forward_backward(1, data_seed=0)


@pytest.mark.parametrize("applied", [False, True])
def test_a_frozen_output_layer_that_is_to_defer_meets_upstreams_error(megatron_ranks, applied):
    with pytest.raises(RankError, match="grad_output_buffer kwarg is only supported"):
        megatron_ranks(2, frozen, applied)
