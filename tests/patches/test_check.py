"""`MEGATRON_IDEMPOTENT_CHECK=1` names what differs between replicas; off, it wraps nothing."""

from __future__ import annotations

import os

import pytest

ID = "replicas-differ-unnoticed"
ON, OFF = {"overlap_grad_reduce": True}, {"overlap_grad_reduce": False}
ALL_REDUCE = {"distributed_optimizer": False}
LAYER = "decoder.layers.1.mlp.linear_fc1.weight"


def step_on(change: str, options: dict) -> str:
    """Runs on a rank: three steps; before the last, rank 1 changes one number. What the check
    says."""
    import torch

    os.environ["MEGATRON_IDEMPOTENT_CHECK"] = "1"
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    assert megatron_idempotent.apply(strict=True)[ID].status in ("applied", "already_applied")
    model = tiny.build(**options)
    if change == "never reduced":
        model.config.finalize_model_grads_func = None
    try:
        for window in range(3):
            model.forward_backward(2, data_seed=window)
            if window == 2 and torch.distributed.get_rank() == 1 and "reduced" not in change:
                param = dict(model.chunks[0].module.named_parameters())[LAYER]
                changed = param.data if change == "parameter" else param.main_grad
                changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(1e9))
            model.step()
    except megatron_idempotent.ReplicaMismatchError as error:
        return str(error)
    return "steps"


@pytest.mark.parametrize(
    "options", [ON, OFF | ALL_REDUCE, {"overlap_param_gather": True}], ids=["on", "off", "gather"]
)
def test_three_steps_that_agree_pass(options, megatron_ranks):
    assert megatron_ranks(2, step_on, "all reduced", options) == ["steps"] * 2


@pytest.mark.parametrize("options", [ON, OFF | ALL_REDUCE], ids=["on", "off"])
def test_gradients_that_were_never_reduced_are_named(options, megatron_ranks):
    for said in megatron_ranks(2, step_on, "never reduced", options):
        assert "was not reduced on every rank" in said
        assert "by rank {0: 0, 1: 0}" in said
        assert "finalize_model_grads_func" in said


@pytest.mark.parametrize("change", ["parameter", "gradient"])
def test_one_bit_in_one_number_is_named_with_parameter_and_rank(change, megatron_ranks):
    for said in megatron_ranks(2, step_on, change, ON | ALL_REDUCE):
        assert f"{change}s differ between data-parallel ranks" in said
        assert f"{LAYER} in bucket group" in said
        assert said.endswith("ranks [1] differ from rank 0")


def sums() -> None:
    """Runs on a rank: what the checksum sees."""
    import torch

    from megatron_idempotent.megatron.replica_check import checksum

    values = torch.arange(3_000_000, dtype=torch.float32)
    swapped = values.clone()
    swapped[[1, 2_999_998]] = swapped[[2_999_998, 1]]
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(swapped)
    assert checksum(torch.zeros(5)) == 0
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.uint8):
        checksum(values[:10].to(dtype))


def test_the_checksum_sees_order_and_signs_of_zero(megatron_ranks):
    megatron_ranks(1, sums)


def status_without_the_switch() -> tuple[str, bool]:
    """Runs on a rank: the row of the check, and whether it stands around any function."""
    os.environ.pop("MEGATRON_IDEMPOTENT_CHECK", None)
    import megatron_idempotent
    from megatron_idempotent.patching.install import state

    row = megatron_idempotent.apply(strict=True)[ID]
    return row.status, any(ID in site.layers for site in state.sites.values())


def test_without_the_switch_nothing_is_wrapped(megatron_ranks):
    assert megatron_ranks(1, status_without_the_switch) == [("disabled", False)]
