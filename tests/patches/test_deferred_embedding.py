"""The output layer's deferred gradient behind aborts, and in a step of several calls."""

from __future__ import annotations

import pytest


def behind_an_abort() -> list[tuple[int, int]]:
    """On a rank: how much the two lists hold behind a window that raises, and a whole one."""
    from megatron_idempotent.patches import _deferred_embedding
    from megatron_idempotent.patches.deferred_embedding_leftovers import schedule

    import megatron_idempotent

    megatron_idempotent.apply()
    model = _deferred_embedding.build(overlap_grad_reduce=False)
    kept = _deferred_embedding.buffers(model.chunks)
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
    """On a rank: calls of one microbatch in a window, and the step in one call."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron_idempotent.patches import _deferred_embedding

    import megatron_idempotent
    from megatron_idempotent.cpu import tiny

    megatron_idempotent.apply()
    model = _deferred_embedding.build(overlap_grad_reduce=False)
    model.forward_backward(4, data_seed=0)
    want = model.gradients()
    model.chunks[0].zero_grad_buffer()
    data = tiny.microbatches(0)
    with megatron_idempotent.accumulation_window(model.chunks, 4):
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
