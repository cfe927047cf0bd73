"""`ensure_params_synced` on real ranks: all that is pending, and free where nothing is."""

from __future__ import annotations

import pytest
from benches import agree, groups

from megatron_idempotent.proof.cpu import RankError

ONLY = ["params-stale-after-step", "pending-gather-dropped", "start-param-sync-reentry"]


def built(*, applied: bool = True, **layout):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if applied:
        megatron_idempotent.apply(only=ONLY)
    return tiny.build(**{"overlap_param_gather": True, **layout})


def synced(model) -> tuple[int, int]:
    """Bucket groups that were pending, and collectives that it took."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu.probes import watching_collectives

    seen: list[str] = []
    with watching_collectives(lambda name, _: seen.append(name)):
        pending = megatron_idempotent.ensure_params_synced(model.chunks)
    return pending, len(seen)


def after_a_step(hooks: bool) -> tuple:
    """Runs on a rank: agreement before, the call, agreement after, and the call once more."""
    model = built()
    if not hooks:
        for chunk in model.chunks:
            chunk.disable_forward_pre_hook()
    model.forward_backward(2, data_seed=0)
    model.step()
    before = agree(model)
    return before, synced(model), agree(model), synced(model), len(groups(model))


@pytest.mark.parametrize("hooks", [True, False])
def test_a_step_is_gathered_once_and_a_second_call_is_free(hooks, megatron_ranks):
    for before, (pending, collectives), after, again, count in megatron_ranks(
        2, after_a_step, hooks
    ):
        assert not before
        assert after
        assert pending == collectives == count > 1
        assert again == (0, 0)


def free_states() -> dict[str, tuple[int, int]]:
    """Runs on a rank: the call in states where nothing is pending."""
    found = {}
    model = built()
    model.forward_backward(1, data_seed=0, forward_only=True)
    found["after a forward"] = synced(model)
    model.forward_backward(2, data_seed=0)
    found["gradients reduced, no step"] = synced(model)
    model.step()
    model.forward_backward(1, data_seed=1, forward_only=True)
    found["a forward after the step"] = synced(model)
    model.step()
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook()
    found["hooks disabled with their synchronisation"] = synced(model)
    plain = built(overlap_param_gather=False)
    found["no overlap, fresh"] = synced(plain)
    plain.forward_backward(2, data_seed=0)
    plain.step()
    found["no overlap, stepped"] = synced(plain)
    all_reduce = built(overlap_param_gather=False, distributed_optimizer=False)
    all_reduce.forward_backward(2, data_seed=0)
    all_reduce.step()
    found["no distributed optimizer"] = synced(all_reduce)
    return found


def test_where_nothing_is_pending_there_is_no_collective(megatron_ranks):
    for found in megatron_ranks(2, free_states):
        assert set(found.values()) == {(0, 0)}, found


def a_rank_alone() -> int:
    """Runs on a rank: only rank 0 calls, with nothing pending."""
    import torch

    model = built()
    model.forward_backward(1, data_seed=0, forward_only=True)
    pending = synced(model)[0] if torch.distributed.get_rank() == 0 else 0
    model.forward_backward(2, data_seed=0)
    return pending


def test_a_rank_may_call_it_alone_where_nothing_is_pending(megatron_ranks):
    assert megatron_ranks(2, a_rank_alone) == [0, 0]


def some_buckets_gathered() -> tuple:
    """Runs on a rank: a forward after the step was aborted with one gather done and one in
    flight."""
    model = built()
    model.forward_backward(2, data_seed=0)
    model.step()
    first = groups(model)[-1]  # the buckets are numbered from the output layer
    first.finish_param_sync()
    in_flight = sum(group.param_gather_handle is not None for group in groups(model))
    return in_flight, synced(model), agree(model), synced(model), len(groups(model))


def test_gathers_in_flight_are_waited_for_and_only_the_rest_is_gathered(megatron_ranks):
    for in_flight, (pending, collectives), after, again, count in megatron_ranks(
        2, some_buckets_gathered
    ):
        assert in_flight == 1
        assert pending == count - 1, "one is done"
        assert collectives == count - 2, "one is in flight"
        assert after
        assert again == (0, 0)


def layout_agrees(layout: dict) -> tuple:
    """Runs on a rank: a step under this layout, then the call."""
    model = built(**layout)
    model.forward_backward(4, data_seed=0)
    model.step()
    pending, _ = synced(model)
    reference = built(**{**layout, "overlap_param_gather": False})
    reference.forward_backward(4, data_seed=0)
    reference.step()
    same = bool((model.parameters() == reference.parameters()).all())
    return pending == len(groups(model)), same, synced(model)


LAYOUTS = {
    "experts": (2, {"experts": 2}),
    "expert-parallel": (4, {"experts": 2, "ep": 2}),
    "virtual-stages": (4, {"pp": 2, "vpp": 2, "layers_per_stage": 1}),
    "aligned": (4, {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True}),
    "tensor-parallel": (4, {"tp": 2}),
    "bf16": (2, {"dtype": "bf16"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_is_that_of_a_run_without_overlap(layout, megatron_ranks):
    ranks, options = LAYOUTS[layout]
    assert megatron_ranks(ranks, layout_agrees, options) == [(True, True, (0, 0))] * ranks


def swap_weights() -> bool:
    """Runs on a rank: save the actor, load a reference, its log-probs, restore the actor."""
    import megatron_idempotent

    model = built()
    model.forward_backward(2, data_seed=0)
    model.step()
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
    return bool((model.parameters() == want).all()) and agree(model)


def test_an_actor_swapped_with_its_reference_comes_back_whole(megatron_ranks):
    assert megatron_ranks(2, swap_weights) == [True, True]


def without_the_patches() -> tuple:
    """Runs on a rank: the case in which upstream's own flag is wrong, with nobody to watch."""
    model = built(applied=False)
    model.forward_backward(2, data_seed=0)
    model.forward_backward(1, data_seed=1, forward_only=True)
    model.step()
    before = agree(model)
    synced(model)
    return before, agree(model), synced(model)[1] == len(groups(model))


def test_without_the_patches_it_gathers_on_every_call(megatron_ranks):
    assert megatron_ranks(2, without_the_patches) == [(False, True, True)] * 2


def an_unwrapped_module() -> None:
    """Runs on a rank."""
    import megatron_idempotent

    model = built()
    megatron_idempotent.ensure_params_synced([chunk.module for chunk in model.chunks])


def test_a_module_without_ddp_is_refused(megatron_ranks):
    with pytest.raises(RankError, match=r"GPTModel, which has no bucket groups: pass"):
        megatron_ranks(2, an_unwrapped_module)


def gradients_share_the_memory() -> None:
    """Runs on a rank: as under MXFP8 with reuse_grad_buf_for_mxfp8_param_ag."""
    import megatron_idempotent

    model = built()
    model.forward_backward(2, data_seed=0)
    model.step()
    model.chunks[0].ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
    megatron_idempotent.ensure_params_synced(model.chunks)


def test_parameters_that_only_the_optimizer_can_stage_are_refused(megatron_ranks):
    with pytest.raises(RankError, match=r"5 bucket groups .* stage the update with the optimizer"):
        megatron_ranks(2, gradients_share_the_memory)
