"""Process groups are destroyed, and made again in place of broken ones."""

from __future__ import annotations

import pytest
from guard_failures import Broken, build, failing, guard


def _live():
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def _cycles():
    from megatron.core import parallel_state

    import megatron_idempotent

    megatron_idempotent.apply(only=["process-groups-leak"])
    live = []
    for _ in range(10):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        parallel_state.destroy_model_parallel()
        live.append(_live())
    return live


def test_ten_cycles_of_initialising_and_destroying_leave_the_default_group(megatron_ranks):
    assert megatron_ranks(2, _cycles) == [[1] * 10] * 2


def _destroy_beside_a_model():
    """A model's groups outlive destroy_model_parallel(), until the model is gone."""
    from megatron.core import parallel_state

    model = build(distributed_optimizer=False)
    parallel_state.destroy_model_parallel()
    kept = _live()
    parallel_state.initialize_model_parallel()
    model.forward_backward(1, data_seed=1)
    del model
    parallel_state.destroy_model_parallel()
    return kept


def test_groups_that_a_model_holds_stay_usable(megatron_ranks):
    assert all(kept > 1 for kept in megatron_ranks(2, _destroy_beside_a_model))


def _train(layout, rebuilds):
    from megatron_idempotent.window import rebuild_process_groups

    model = build(**layout)
    seen, live = [], []
    for seed in range(3):
        model.forward_backward(2, data_seed=seed)
        gradients = model.gradients()
        _, norm, _ = model.step()
        seen.append((gradients, norm, model.parameters()))
        if rebuilds:
            rebuild_process_groups(model.chunks, model.optimizer)
            live.append(_live())
    return seen, live


def _rebuild_between_steps(layout):
    import torch

    expected, _ = _train(layout, rebuilds=False)
    seen, live = _train(layout, rebuilds=True)
    for (a, norm, b), (c, other, d) in zip(expected, seen, strict=True):
        assert torch.equal(a, c)
        assert float(norm) == float(other)
        assert torch.equal(b, d)
    return live


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        {"overlap_param_gather": True},
        {"pp": 2, "vpp": 2, "layers_per_stage": 1},
        {"tp": 2, "sequence_parallel": True, "overlap_grad_reduce": False},
    ],
    ids=["dp", "pp", "tp"],
)
def test_training_goes_on_to_the_bit_in_new_groups_and_none_is_left(layout, megatron_ranks):
    for live in megatron_ranks(2, _rebuild_between_steps, layout, timeout_s=300):
        assert len(set(live)) == 1


def _held_by_a_variable():
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_idempotent import SessionPoisoned
    from megatron_idempotent.window import rebuild_process_groups

    model = build()
    mine = parallel_state.get_data_parallel_group() if dist.get_rank() == 1 else None
    with pytest.raises(SessionPoisoned, match=r"still held by a variable .* on rank 1"):
        rebuild_process_groups(model.chunks, model.optimizer)
    del mine


def test_all_ranks_know_where_an_old_group_is_still_held(megatron_ranks):
    megatron_ranks(2, _held_by_a_variable)


def _poisoned_and_rebuilt(layout, site):
    """A failure that cannot be carried: refused from then on, until the groups are new."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, pipeline_parallel

    from megatron_idempotent import SessionPoisoned
    from megatron_idempotent.window import agree, guarded_window, rebuild_process_groups

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        distributed_timeout_minutes=0.1,  # gloo gives up on a peer after that
    )
    model = build(**layout)
    guard(model, deadline_s=5.0)
    get_forward_backward_func = pipeline_parallel.get_forward_backward_func
    model.forward_backward(2, data_seed=1)
    expected = model.gradients()
    errors = SessionPoisoned
    if site == "interrupt" and dist.get_rank() == 1:
        errors = KeyboardInterrupt
        model.on_microbatch = _interrupt
    here = dist.get_rank() == 1 and site != "interrupt"
    with failing(model, site, 1, here), pytest.raises(errors) as poisoned:
        model.forward_backward(2, data_seed=2)
    model.on_microbatch = None
    with pytest.raises(SessionPoisoned, match="rebuild_process_groups"):
        guarded_window(get_forward_backward_func.stock(), model=model.chunks)
    with pytest.raises(SessionPoisoned):
        agree()
    rebuild_process_groups(model.chunks, model.optimizer)
    model.forward_backward(2, data_seed=1)
    assert torch.equal(model.gradients(), expected)
    return str(poisoned.value)


def _interrupt(index, loss):
    if index == 1:
        raise KeyboardInterrupt("by hand")


def test_a_failure_inside_a_tensor_parallel_layer_poisons_until_groups_are_new(megatron_ranks):
    told = megatron_ranks(2, _poisoned_and_rebuilt, {"tp": 2}, "layer@1", timeout_s=120)
    assert "layer@1; it cannot be reported later with tensor_model_parallel_size=2" in told[1]
    assert "(forward of the model, microbatch 1: Broken: layer@1)" in told[0]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pp": 2}, id="pp"),
        pytest.param({}, id="dp", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_leaves_its_window_poisons_the_others_within_the_deadline(
    layout, megatron_ranks
):
    told = megatron_ranks(2, _poisoned_and_rebuilt, layout, "interrupt", timeout_s=120)
    assert "KeyboardInterrupt: by hand" in told[0]


def _carried_with_tensor_parallelism(site, ranks):
    """A failure in the loss, where the backward runs over zeros, or in the same line of all."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent import WindowAborted

    model = build(tp=2, sequence_parallel=True)
    guard(model)
    model.forward_backward(2, data_seed=1)
    expected = model.gradients()
    here = dist.get_rank() in ranks
    with failing(model, site, 0, here), pytest.raises(WindowAborted) as aborted:
        model.forward_backward(2, data_seed=2)
    assert isinstance(aborted.value.__cause__, Broken) == here
    assert sorted(aborted.value.failures) == list(ranks)
    model.forward_backward(2, data_seed=1)
    assert torch.equal(model.gradients(), expected)


def test_a_bad_loss_on_one_tensor_parallel_rank_is_carried(megatron_ranks):
    megatron_ranks(2, _carried_with_tensor_parallelism, "loss", (1,))


@pytest.mark.parametrize("site", ["layer@1", "backward@0"])
def test_a_failure_in_the_same_layer_of_all_tensor_parallel_ranks_is_carried(site, megatron_ranks):
    megatron_ranks(2, _carried_with_tensor_parallelism, site, (0, 1))
