"""`MEGATRON_IDEMPOTENT_CHECK=1` names what differs between replicas; off, it wraps nothing."""

import contextlib
import os

import pytest
import torch
from ranks import on_ranks

import megatron_idempotent

ID = "replicas-differ-unnoticed"
ON, OFF = {"overlap_grad_reduce": True}, {"overlap_grad_reduce": False}
ALL_REDUCE = {"distributed_optimizer": False}
LAYER = "decoder.layers.1.mlp.linear_fc1.weight"
NEVER = r"was not reduced on every rank.*by rank \{0: 0, 1: 0\}.*finalize_model_grads_func"


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("none", ON, None),
        ("none", OFF | ALL_REDUCE, None),
        ("none", {"overlap_param_gather": True}, None),
        ("never reduced", ON, NEVER),
        ("never reduced", OFF | ALL_REDUCE, NEVER),
        *(
            (
                change,
                ON | ALL_REDUCE,
                rf"{change}s differ between data-parallel ranks.*{LAYER} in bucket group.*"
                r"ranks \[1\] differ from rank 0$",
            )
            for change in ("parameter", "gradient")
        ),
    ],
    ids=["on", "off", "gather", "never-on", "never-off", "parameter", "gradient"],
)
@on_ranks(2)
def test_what_differs_before_a_step_is_named(change, options, said):
    """Three steps; before the last, rank 1 changes one bit of one number."""
    os.environ["MEGATRON_IDEMPOTENT_CHECK"] = "1"
    from megatron_idempotent.proof.cpu import tiny

    assert megatron_idempotent.apply(strict=True)[ID].status in ("applied", "already_applied")
    model = tiny.build(**options)
    if change == "never reduced":
        model.config.finalize_model_grads_func = None
    error = megatron_idempotent.ReplicaMismatchError
    with pytest.raises(error, match=said) if said else contextlib.nullcontext():
        for window in range(3):
            model.forward_backward(2, data_seed=window)
            mine = window == 2 and torch.distributed.get_rank() == 1
            if mine and change in ("parameter", "gradient"):
                param = dict(model.chunks[0].module.named_parameters())[LAYER]
                changed = param.data if change == "parameter" else param.main_grad
                changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(1e9))
            model.step()


MOE = {"experts": 2, "ep": 2, "etp": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [{"sequence_parallel": True}, {"sequence_parallel": False}, {"sequence_parallel": True} | MOE],
    ids=["sequence", "no-sequence", "experts"],
)
@pytest.mark.parametrize("distributed_optimizer", [True, False])
@on_ranks(2)
def test_a_gradient_that_is_not_summed_over_tensor_parallel_ranks_is_named(
    layout, distributed_optimizer
):
    """The right program goes on; then a norm's weight gets the gradient of a rank's own tokens."""
    os.environ["MEGATRON_IDEMPOTENT_CHECK"] = "1"
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(strict=True)
    model = tiny.build(tp=2, distributed_optimizer=distributed_optimizer, **layout)
    for window in range(3):
        model.train_step(2, data_seed=window)
    if not layout["sequence_parallel"]:
        return
    norm = "decoder.layers.0.input_layernorm.weight"
    dict(model.chunks[0].module.named_parameters())[norm].sequence_parallel = False
    model.train_step(2, data_seed=3)
    said = rf"tensor-parallel ranks.*{norm} is the first; ranks \[1\] differ from rank 0"
    with pytest.raises(megatron_idempotent.ReplicaMismatchError, match=said):
        model.train_step(2, data_seed=4)


@on_ranks(1)
def test_the_checksum_sees_order_and_signs_of_zero():
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


@on_ranks(1)
def test_without_the_switch_nothing_is_wrapped():
    os.environ.pop("MEGATRON_IDEMPOTENT_CHECK", None)
    from megatron_idempotent.patching.install import state

    assert megatron_idempotent.apply(strict=True)[ID].status == "disabled"
    assert not any(ID in site.layers for site in state.sites.values())
