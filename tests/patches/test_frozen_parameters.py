"""Parameters that are frozen and unfrozen after DDP and the optimizer were built."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import built, on_ranks, same

from megatron_idempotent import ensure_params_synced
from megatron_idempotent.megatron.optimizers import frozen, stepping, unchained

pytestmark = [pytest.mark.full, pytest.mark.patched]

HOST = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
LATER = pytest.mark.exhaustive


def parameters(model: Any) -> list[Any]:
    ensure_params_synced(model.chunks)
    return [each for chunk in model.chunks for each in chunk.parameters()]


def freeze(model: Any, *, yes: bool) -> None:
    for each in parameters(model)[::2]:
        each.requires_grad_(not yes)


def of_frozen(model: Any) -> list[Any]:
    """Copy what is stepped for parameters that are frozen, and its moments."""
    found = []
    for one in unchained(model.optimizer):
        for main in frozen(one):
            state = one.optimizer.state.get(main, {})
            found += [main, *(value for key, value in state.items() if key != "step")]
    return [each.detach().clone() for each in found]


def counts(model: Any) -> list[float]:
    """Return the step of each parameter, which Megatron saves only if they are one."""
    inner = [each for one in unchained(model.optimizer) for each in stepping(one.optimizer)]
    groups = [
        (one, each) for one in inner for group in one.param_groups for each in group["params"]
    ]
    return [float(one.state[each].get("step", -1)) for one, each in groups]


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        pytest.param({"distributed_optimizer": False}, {}, id="fp32"),
        pytest.param({"dtype": "bf16", "distributed_optimizer": False}, {}, id="bf16", marks=LATER),
        pytest.param({"dtype": "fp16", "loss_scale": 64.0}, {}, id="fp16, distributed"),
        pytest.param({"overlap_param_gather": True}, {}, id="fp32, gathers", marks=LATER),
        pytest.param({"dtype": "bf16", "experts": 2}, {}, id="experts", marks=LATER),
        pytest.param(
            {"dtype": "bf16"}, {**HOST, "optimizer_offload_fraction": 0.5}, id="half on the host"
        ),
        pytest.param(
            {"dtype": "bf16"},
            {**HOST, "optimizer_offload_fraction": 0.5, "use_precision_aware_optimizer": True},
            id="precise",
            marks=LATER,
        ),
        pytest.param(
            {"distributed_optimizer": False},
            {**HOST, "optimizer_offload_fraction": 1.0},
            id="fp32 on the host",
            marks=LATER,
        ),
        pytest.param(
            {"dtype": "bf16", "distributed_optimizer": False},
            {"optimizer": "sgd"},
            id="sgd",
            marks=LATER,
        ),
    ],
)
@on_ranks(2)
def test_frozen_parameters_keep_bits_and_moments_until_they_are_unfrozen(layout, overrides):
    for steps in 0, 2:  # frozen before the first step, and later
        model = built(optimizer_overrides={"lr": 0.1, **overrides}, **layout)
        for seed in range(steps):
            model.train_step(1, data_seed=seed)
        freeze(model, yes=True)
        kept = of_frozen(model)
        before = [each.detach().clone() for each in parameters(model)]
        for seed in range(2, 4):
            model.train_step(2, data_seed=seed)
        if not steps:  # moments are there now, and they are zero
            mains = [each for one in unchained(model.optimizer) for each in frozen(one)]
            assert all(map(same, kept, mains))
        else:
            assert all(map(same, kept, of_frozen(model)))
        moved = [not same(one, two) for one, two in zip(before, parameters(model), strict=True)]
        assert not any(moved[::2])
        assert all(moved[1::2])
        assert len(set(counts(model))) == 1
        freeze(model, yes=False)
        before = [each.detach().clone() for each in parameters(model)]
        model.train_step(1, data_seed=4)
        assert not all(map(same, before[::2], parameters(model)[::2]))
        assert len(set(counts(model))) == 1


@pytest.mark.parametrize("frozen_at", [0, pytest.param(2, marks=LATER)])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        pytest.param(2, {"distributed_optimizer": False}, marks=LATER),
        pytest.param(4, {"ddp_overrides": {"num_distributed_optimizer_instances": 2}}, marks=LATER),
        pytest.param(4, {"pp": 2}, marks=LATER),
        pytest.param(2, {"experts": 2}, marks=LATER),
    ],
)
@on_ranks("ranks")
def test_with_overlap_what_is_beside_them_learns_the_same(options, frozen_at):
    if instances := options.get("ddp_overrides"):
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(**instances)
    found = []
    for overlap in True, False:
        model = built(
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and options.get("distributed_optimizer", True),
            optimizer_overrides={"clip_grad": 0.0},  # whose norm depends on how it is sharded
            **options,
        )
        for seed in range(6):
            freeze(model, yes=frozen_at <= seed < frozen_at + 2)
            model.train_step(2, data_seed=seed)
        ensure_params_synced(model.chunks)
        found.append(model.parameters())
    assert same(*found)
