"""Ranks' parts of a model are put together and compared, and what does not fit is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks

from megatron_idempotent.proof.certify.parameters import Main, ParameterPart, compared, joined_main
from megatron_idempotent.proof.certify.protocol import Wrong
from megatron_idempotent.proof.certify.states import States, first_difference
from megatron_idempotent.proof.cpu import tiny

WHOLE = {"a": torch.arange(8.0).view(4, 2) + 0.1, "b": torch.arange(3.0) + 20.3}
OWN = [
    ParameterPart(name="a", dimension=0, rank=1, size=2, value=WHOLE["a"][2:]),
    ParameterPart(name="b", dimension=None, rank=0, size=1, value=WHOLE["b"]),
]
BOTH = {"a", "b"}


@pytest.mark.parametrize(
    ("exported", "names"),
    [
        ([part.value for part in OWN], BOTH),
        ([*WHOLE.values()], BOTH),
        ({"b": WHOLE["b"], "a": WHOLE["a"]}, BOTH),
        (iter(WHOLE.items()), BOTH),
        ({"a": WHOLE["a"][2:]}, {"a"}),
        ({"x": WHOLE["a"].T.flatten(), "y": {"z": WHOLE["b"]}}, BOTH),
        ([each.bfloat16() for each in WHOLE.values()], BOTH),
        ([], set()),
        (None, set()),
        ("a/path", set()),
    ],
)
def test_right_values_are_found(exported, names):
    assert compared(exported, OWN, WHOLE) == (names, None)


@pytest.mark.parametrize(
    ("exported", "said"),
    [
        ([torch.zeros_like(part.value) for part in OWN], "2 tensors differ, the first is a"),
        ({"a": WHOLE["a"], "b": WHOLE["b"] + 1}, "1 tensors differ, the first is b"),
        ({"a": WHOLE["a"][:2]}, "1 tensors differ, the first is a"),
        ([torch.zeros(11)], "the numbers of the model's parameters are not among them"),
    ],
)
def test_other_values_are_told(exported, said):
    assert compared(exported, OWN, WHOLE)[1] == said


MAIN = torch.tensor([[1.0009765625, 2.0], [3.0, 4.0]])


def part(start, end, changed=0.0):
    return Main(start=start, values=MAIN.flatten()[start:end] + changed)


def test_parts_are_joined_in_the_shape_of_the_models_parameter():
    found = joined_main("w", MAIN.bfloat16(), [part(2, 4), part(0, 3)])
    assert torch.equal(found, MAIN)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(0, 2)], "no rank has 2 elements of the main parameter of w"),
        ([part(0, 3), part(2, 4, 0.5)], "ranks have other bits in the main parameter of w"),
        ([part(0, 4, 1.0)], "w is not its main parameter, rounded"),
    ],
)
def test_parts_that_do_not_fit_are_said(parts, said):
    with pytest.raises(Wrong, match=said):
        joined_main("w", MAIN.bfloat16(), parts)


def test_a_tensor_of_another_type_is_a_difference():
    whole, half = {"bias": torch.zeros(2)}, {"bias": torch.zeros(2, dtype=torch.float16)}
    assert first_difference(whole, half) == "bias is torch.float16 instead of torch.float32"
    assert first_difference(whole, {"bias": torch.zeros(2)}) is None


def tell_apart() -> list[object]:
    """Runs on a rank: what the two memories say of a tensor, and what is left after the block."""
    from megatron_idempotent.proof.cpu.placement import naming_devices

    one = torch.ones(2, device="cuda")
    with naming_devices():
        copies = [one.cpu(), one.to("cpu"), one.to(device="cpu"), one.to(torch.device("cpu"))]
        copies.append(one.to(copies[0]))
        back = [copies[0].cuda(), copies[0].to("cuda"), copies[0].to(0), copies[0].to(one)]
        same = [one.cuda(), one.to("cuda:0"), one.to(torch.float32), copies[0].cpu()]
        said = [(each.is_cuda, each.device.type) for each in (one, *copies, *back)]
        shared = [each.data_ptr() in (one.data_ptr(), copies[0].data_ptr()) for each in same]
        apart = len({each.data_ptr() for each in (one, *copies, *back)}) == 10
        meta = torch.empty(2, device="meta").device.type
    return [said, shared, apart, meta, one.device.type == "cpu"]


def test_host_and_device_are_told_apart_as_on_a_gpu(megatron_rank_pool):
    (found,) = megatron_rank_pool.run(1, tell_apart, distributed=False)
    said, shared, apart, meta, restored = found
    assert said == [(True, "cuda"), *[(False, "cpu")] * 5, *[(True, "cuda")] * 4]
    assert all(shared)
    assert apart
    assert meta == "meta"
    assert restored


def bias_beside_a_frozen_weight(patched: bool) -> list[Any]:
    """Runs on a rank: gradients of biases, beside trained weights and frozen ones."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if patched:
        megatron_idempotent.apply(["frozen-weight-bias-untrained"])
    found = []
    for trained in (("linear_qkv.bias", "linear_qkv.weight"), ("linear_qkv.bias",)):

        def prepare(module, trained=trained):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name.endswith(trained))

        model = tiny.build(before_ddp=prepare, overlap_grad_reduce=False)
        model.forward_backward(1, data_seed=0)
        named = model.chunks[0].module.named_parameters()
        found.append([each.main_grad for name, each in named if name.endswith("linear_qkv.bias")])
    return found


def test_a_bias_beside_a_frozen_weight_has_the_bits_of_one_beside_a_trained_weight(
    megatron_rank_pool,
):
    # Stock Megatron computes none of it: so no adapter here has such a bias.
    ((trained, stock),) = megatron_rank_pool.run(1, bias_beside_a_frozen_weight, False)
    assert not any(each.any() for each in stock)
    ((_, patched),) = megatron_rank_pool.run(1, bias_beside_a_frozen_weight, True)
    assert all(each.any() for each in trained)
    assert all(map(torch.equal, trained, patched))


@on_ranks(1)
def test_a_groups_rates_are_those_that_megatrons_scheduler_gives_it() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = tiny.build().optimizer
    for group in optimizer.param_groups:
        group["wd_mult"] = 0.25
    same = {"lr_warmup_steps": 0, "lr_decay_steps": 9, "lr_decay_style": "constant"}
    same |= {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 9, "wd_incr_style": "constant"}
    rates = {"lr": 1e-3, "weight_decay": 0.1}
    states: Any = SimpleNamespace(model=SimpleNamespace(optimizer=optimizer))
    expected = States.groups_at(states, rates)
    OptimizerParamScheduler(optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, **same)
    names = ("lr", "weight_decay")
    assert expected
    assert [tuple(group[name] for name in names) for group in expected] == [
        tuple(group[name] for name in names) for group in optimizer.param_groups
    ]
