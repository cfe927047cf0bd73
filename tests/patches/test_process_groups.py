"""Process groups are destroyed, and made again in place of broken ones."""

import pytest
import torch.distributed as dist
from guard_failures import Broken, failing, guard
from ranks import VIRTUAL, built, fails, on_microbatch, on_ranks, same

import megatron_idempotent

pytestmark = [pytest.mark.full, pytest.mark.patched]


def _live():
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


@on_ranks(2)
def test_groups_that_a_model_holds_stay_usable_until_it_is_gone():
    from megatron.core import parallel_state

    model = built(distributed_optimizer=False)
    parallel_state.destroy_model_parallel()
    assert _live() > 1
    parallel_state.initialize_model_parallel()
    model.forward_backward(1, data_seed=1)
    del model
    parallel_state.destroy_model_parallel()


LAYOUTS = [
    {"overlap_param_gather": True},
    VIRTUAL,
    {"tp": 2, "sequence_parallel": True, "overlap_grad_reduce": False},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp", "pp", "tp"])
@on_ranks(2, timeout_s=300)
def test_training_goes_on_to_the_bit_in_new_groups_and_none_is_left(layout):
    def train(rebuilds):
        model = built(**layout)
        for seed in range(3):
            model.forward_backward(2, data_seed=seed)
            gradients = model.gradients()
            _, norm, _ = model.step()
            seen = gradients, norm, model.parameters()
            if rebuilds:
                megatron_idempotent.window.rebuild_process_groups(model.chunks, model.optimizer)
            yield seen, _live()

    expected = [seen for seen, _ in train(rebuilds=False)]
    rebuilt = list(train(rebuilds=True))
    for (a, norm, b), ((c, other, d), _) in zip(expected, rebuilt, strict=True):
        assert same(a, c)
        assert float(norm) == float(other)
        assert same(b, d)
    assert len({live for _, live in rebuilt}) == 1


@on_ranks(2)
def test_all_ranks_know_where_an_old_group_is_still_held():
    from megatron.core import parallel_state

    model = built()
    mine = parallel_state.get_data_parallel_group() if dist.get_rank() == 1 else None
    with pytest.raises(
        megatron_idempotent.SessionPoisoned, match=r"still held by a variable .* on rank 1"
    ):
        megatron_idempotent.window.rebuild_process_groups(model.chunks, model.optimizer)
    del mine


@pytest.mark.parametrize(
    ("site", "layout"),
    [
        # A failure that cannot be carried.
        ("layer@1", {"tp": 2}),
        # A rank that leaves its window.
        ("interrupt", {"pp": 2}),
        pytest.param("interrupt", {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@on_ranks(2, timeout_s=120)
def test_what_cannot_be_carried_poisons_within_the_deadline_until_groups_are_new(site, layout):
    import contextlib

    from megatron.core import parallel_state, pipeline_parallel

    from megatron_idempotent import SessionPoisoned
    from megatron_idempotent.window import agree, guarded_window, rebuild_process_groups

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        distributed_timeout_minutes=0.1,  # gloo gives up on a peer after that
    )
    model = built(**layout)
    guard(model, deadline_s=5.0)
    get_forward_backward_func = pipeline_parallel.get_forward_backward_func
    model.forward_backward(2, data_seed=1)
    expected = model.gradients()
    here, left = dist.get_rank() == 1, site == "interrupt"
    with contextlib.ExitStack() as stack:
        if here and left:
            action = fails(KeyboardInterrupt("by hand"), 1)
            stack.enter_context(on_microbatch(model, action))
        stack.enter_context(failing(model, site, 1, here and not left))
        errors = KeyboardInterrupt if here and left else SessionPoisoned
        poisoned = stack.enter_context(pytest.raises(errors))
        model.forward_backward(2, data_seed=2)
    if left:
        assert here or "KeyboardInterrupt: by hand" in str(poisoned.value)
    elif here:
        said = "layer@1; it cannot be reported later with tensor_model_parallel_size=2"
        assert said in str(poisoned.value)
    else:
        said = "(forward of the model, microbatch 1: Broken: layer@1)"
        assert said in str(poisoned.value)
    with pytest.raises(SessionPoisoned, match="rebuild_process_groups"):
        guarded_window(get_forward_backward_func.stock(), model=model.chunks)
    with pytest.raises(SessionPoisoned):
        agree()
    rebuild_process_groups(model.chunks, model.optimizer)
    model.forward_backward(2, data_seed=1)
    assert same(model.gradients(), expected)


@pytest.mark.parametrize(
    ("site", "ranks"), [("loss", [1]), ("layer@1", [0, 1]), ("backward@0", [0, 1])]
)
@on_ranks(2)
def test_what_all_tensor_parallel_ranks_can_go_on_after_is_carried(site, ranks):
    """A failure in the loss, where the backward runs over zeros, or in the same line of all."""
    model = built(tp=2, sequence_parallel=True)
    guard(model)
    model.forward_backward(2, data_seed=1)
    expected = model.gradients()
    here = dist.get_rank() in ranks
    with failing(model, site, 0, here), pytest.raises(megatron_idempotent.WindowAborted) as aborted:
        model.forward_backward(2, data_seed=2)
    assert isinstance(aborted.value.__cause__, Broken) == here
    assert sorted(aborted.value.failures) == ranks
    model.forward_backward(2, data_seed=1)
    assert same(model.gradients(), expected)
