"""A collective that a poisoned session drops is not waited for, and not in the way."""

from __future__ import annotations

from ranks import on_ranks


@on_ranks(2)
def test_a_reduction_that_was_dropped_does_not_hinder_the_next_one() -> None:
    """A window after reductions that were under way in a session that ended."""
    import torch

    from megatron_idempotent.megatron.ddp import bucket_groups
    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.window.abort import drop_collectives

    model = tiny.build(overlap_grad_reduce=True)
    model.forward_backward(2, data_seed=3)
    want = model.gradients()
    under_way = []
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
        for group in bucket_groups(chunk):
            group.start_grad_sync()
            under_way.append(group.grad_reduce_handle)
    assert all(handle is not None for handle in under_way)
    drop_collectives(model.chunks)
    for handle in under_way:  # or they would write into the next window's gradients
        handle.wait()
    model.forward_backward(2, data_seed=3)
    assert torch.equal(model.gradients(), want)
