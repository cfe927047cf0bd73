"""`ensure_params_synced` on real ranks: all that is pending, and free where nothing is."""

from __future__ import annotations

import pytest
from ranks import VIRTUAL, agree, built, groups, on_ranks

import megatron_idempotent

ONLY = ["params-stale-after-step", "pending-gather-dropped", "start-param-sync-reentry"]


def stepped(microbatches: int = 2, **layout):
    """A bench after a window and a step."""
    model = built(ONLY, **{"overlap_param_gather": True, **layout})
    model.train_step(microbatches, data_seed=0)
    return model


def synced(model) -> tuple[int, int]:
    """Bucket groups that were pending, and collectives that it took."""
    from megatron_idempotent.proof.cpu.probes import watching_collectives

    seen: list[str] = []
    with watching_collectives(lambda name, _: seen.append(name)):
        pending = megatron_idempotent.ensure_params_synced(model.chunks)
    return pending, len(seen)


@pytest.mark.parametrize("hooks", [True, False])
@on_ranks(2)
def test_a_step_is_gathered_once_and_a_second_call_is_free(hooks):
    model = built(ONLY, overlap_param_gather=True)
    if not hooks:
        for chunk in model.chunks:
            chunk.disable_forward_pre_hook()
    model.train_step(2, data_seed=0)
    assert not agree(model)
    count = len(groups(model))
    assert count > 1
    assert synced(model) == (count, count)
    assert agree(model)
    assert synced(model) == (0, 0)


@on_ranks(2)
def test_where_nothing_is_pending_there_is_no_collective():
    model = built(ONLY, overlap_param_gather=True)
    model.forward_backward(1, data_seed=0, forward_only=True)
    assert synced(model) == (0, 0), "after a forward"
    model.forward_backward(2, data_seed=0)
    assert synced(model) == (0, 0), "gradients reduced, no step"
    model.step()
    model.forward_backward(1, data_seed=1, forward_only=True)
    assert synced(model) == (0, 0), "a forward after the step"
    model.step()
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook()
    assert synced(model) == (0, 0), "hooks disabled with their synchronisation"
    assert synced(built(ONLY)) == (0, 0), "no overlap, fresh"
    assert synced(stepped(overlap_param_gather=False)) == (0, 0), "no overlap, stepped"
    plain = stepped(overlap_param_gather=False, distributed_optimizer=False)
    assert synced(plain) == (0, 0), "no distributed optimizer"


@on_ranks(2)
def test_a_rank_may_call_it_alone_where_nothing_is_pending():
    import torch

    model = built(ONLY, overlap_param_gather=True)
    model.forward_backward(1, data_seed=0, forward_only=True)
    if torch.distributed.get_rank() == 0:
        assert synced(model)[0] == 0
    model.forward_backward(2, data_seed=0)


@on_ranks(2)
def test_gathers_in_flight_are_waited_for_and_only_the_rest_is_gathered():
    """A forward after the step was aborted with one gather done and one in flight."""
    model = stepped()
    groups(model)[-1].finish_param_sync()  # the buckets are numbered from the output layer
    assert sum(group.param_gather_handle is not None for group in groups(model)) == 1
    count = len(groups(model))
    assert synced(model) == (count - 1, count - 2), "one is done, and one is in flight"
    assert agree(model)
    assert synced(model) == (0, 0)


LAYOUTS = {
    "experts": (2, {"experts": 2}),
    "expert-parallel": (4, {"experts": 2, "ep": 2}),
    "virtual-stages": (4, VIRTUAL),
    "aligned": (4, {**VIRTUAL, "align": True}),
    "tensor-parallel": (4, {"tp": 2}),
    "bf16": (2, {"dtype": "bf16"}),
}


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS.values(), ids=LAYOUTS)
@on_ranks("ranks")
def test_the_result_is_that_of_a_run_without_overlap(layout):
    model = stepped(4, **layout)
    assert synced(model)[0] == len(groups(model))
    reference = stepped(4, **layout, overlap_param_gather=False)
    assert (model.parameters() == reference.parameters()).all()
    assert synced(model) == (0, 0)


@on_ranks(2)
def test_an_actor_swapped_with_its_reference_comes_back_whole():
    """Save the actor, load a reference, its log-probs, restore the actor."""
    model = stepped()
    megatron_idempotent.ensure_params_synced(model.chunks)
    want = model.parameters()
    (chunk,) = model.chunks
    actor = {name: p.detach().clone() for name, p in chunk.module.named_parameters()}
    reference = {name: value * 0 + 0.01 for name, value in actor.items()}
    for weights in (reference, actor):
        megatron_idempotent.ensure_params_synced(model.chunks)
        for name, p in chunk.module.named_parameters():
            p.data.copy_(weights[name])
        model.forward_backward(1, data_seed=5, forward_only=True)
    assert (model.parameters() == want).all()
    assert agree(model)


@on_ranks(2)
def test_without_the_patches_it_gathers_on_every_call():
    """The case in which upstream's own flag is wrong, with nobody to watch."""
    model = built(applied=False, overlap_param_gather=True)
    model.forward_backward(2, data_seed=0)
    model.forward_backward(1, data_seed=1, forward_only=True)
    model.step()
    assert not agree(model)
    synced(model)
    assert agree(model)
    assert synced(model)[1] == len(groups(model))


@on_ranks(2)
def test_what_it_cannot_gather_is_refused():
    model = stepped()
    # As under MXFP8: gradients share the memory, so that only the optimizer can stage the update.
    model.chunks[0].ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
    with pytest.raises(NotImplementedError, match="5 bucket groups"):
        megatron_idempotent.ensure_params_synced(model.chunks)
