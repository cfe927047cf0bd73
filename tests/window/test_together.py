"""A block that one rank leaves is left by all, and who waits for whom is known before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ranks import on_ranks

from megatron_idempotent.window import agreement

DONE = "All is as it was."


class Broken(BaseException):
    """Is no Exception, as SystemExit and torch's CheckpointException."""


def block(failing: str) -> str:
    """Leave a block with a nested one on rank 1, at a place, and return what this rank is told."""
    here = dist.get_rank() == 1

    def pass_by(place: str) -> None:
        if here and place == failing:
            raise Broken(place)

    try:
        with agreement.as_one(DONE):
            pass_by("at first")
            with agreement.as_one("not told"):
                agreement.meet(DONE)
                pass_by("between")
            agreement.meet(DONE)
            pass_by("at last")
    except (Broken, agreement.WindowAborted) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks(2)
def test_all_ranks_leave_a_block_that_one_leaves():
    for place in ("at first", "between", "at last"):
        own = f"Broken: {place}"
        told = f"WindowAborted: rank 1: {own}. {DONE}"
        assert block(place) == (own if dist.get_rank() == 1 else told)
    assert block("nowhere") == "nothing"


def test_outside_of_a_block_an_error_is_raised_at_once():
    agreement.meet(DONE)
    with pytest.raises(OSError, match="no file"):
        agreement.meet(DONE, OSError("no file"))


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


MET = [
    {"expert_model_parallel_size": 2, "num_moe_experts": 4},
    {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
    {"expert_tensor_parallel_size": 2, "num_moe_experts": 4},
    {"expert_tensor_parallel_size": 4, "tensor_model_parallel_size": 2, "num_moe_experts": 4},
    {"expert_gtp_weight_remat_size": 2, "num_moe_experts": 4},
]
NOT_MET = [
    {},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    {"moe_router_load_balancing_type": "aux_loss", "num_moe_experts": 4},
    {"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2, "num_moe_experts": 4},
    {"expert_tensor_parallel_size": 2, "num_moe_experts": None},
]


@on_ranks(1)
def test_whether_replicas_meet_inside_of_a_layer():
    """The settings for which replicas meet, or None."""
    from megatron_idempotent.window.guard import across_replicas

    found = [across_replicas(SimpleNamespace(**config)) for config in (*MET, *NOT_MET)]
    assert found[len(MET) :] == [None] * len(NOT_MET)
    for config, why in zip(MET, found, strict=False):
        assert why is not None
        assert why.split("=")[0] in config
