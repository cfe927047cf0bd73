"""Weights have the marks by which the gradient norm counts each of their elements once."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import RELEASE, built, needs_release, on_ranks

needs_release((0, 12), "the tests need a Megatron")

pytestmark = [pytest.mark.full, pytest.mark.patched]

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


@pytest.mark.skipif(RELEASE < (0, 15), reason="attention has no sinks")
@on_ranks(1)
def test_sinks_of_one_rank_stay_as_they_are() -> None:
    model = built(tp=1, overlap_grad_reduce=False, config_overrides={"softmax_type": "learnable"})
    sinks = [each for name, each in model.chunks[0].named_parameters() if "softmax_off" in name]
    assert sinks
    assert not any(getattr(each, "tensor_model_parallel", False) for each in sinks)


@pytest.mark.parametrize("defaults", [False, True])
@pytest.mark.parametrize("experts", [None, 2])
@on_ranks(2)
def test_marks_are_those_of_an_initialized_model(experts: int | None, defaults: bool) -> None:
    """Also where the marks that are missing were written as False, as Megatron's set-up does."""
    from megatron.core.tensor_parallel import layers

    def write_defaults(module: Any) -> None:
        for each in module.parameters() if defaults else ():
            layers.set_defaults_if_not_set_tensor_model_parallel_attributes(each)

    marks = []
    for initialized in (True, False):
        model = built(
            tp=2,
            dtype="bf16",
            overlap_grad_reduce=False,
            experts=experts,
            sequence_parallel=experts is not None,
            before_ddp=write_defaults,
            config_overrides={"perform_initialization": initialized},
        )
        marks.append(
            {
                name: [getattr(each, mark, None) for mark in MARKS]
                for name, each in model.chunks[0].named_parameters()
            }
        )
    initialized_marks, others = marks
    assert others == initialized_marks
    assert sum(bool(values[0]) for values in others.values()) > 4
