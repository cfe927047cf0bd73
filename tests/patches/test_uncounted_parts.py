"""The gradient norm and the number of zeros have each element of a weight once."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_idempotent.patches._case import counted
from megatron_idempotent.patches._engine_layers import duplicated
from ranks import RELEASE, built, needs_release, on_ranks

needs_release((0, 12), "the tests need a Megatron")

pytestmark = pytest.mark.full

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")
has_sinks = pytest.mark.skipif(RELEASE < (0, 15), reason="attention has no sinks")


def counts(model: Any, pattern: str) -> tuple[int, int]:
    """Return the elements of such parameters in the norm, and in the number of zeros."""
    return counted(model, pattern), counted(model, pattern, zeros=True)


def plain(**options: Any) -> dict[str, Any]:
    """Return options of a bench on two tensor-parallel ranks that counts zeros, too."""
    return {
        "tp": 2,
        "dtype": "bf16",
        "overlap_grad_reduce": False,
        "optimizer_overrides": {"log_num_zeros_in_grad": True},
        **options,
    }


@has_sinks
@pytest.mark.parametrize("distributed_optimizer", [True, False])
@on_ranks(2)
def test_the_sinks_of_all_heads_are_counted_once(distributed_optimizer: bool) -> None:
    model = built(
        **plain(distributed_optimizer=distributed_optimizer),
        config_overrides={"softmax_type": "learnable"},
    )
    heads = model.config.num_attention_heads * model.config.num_layers
    assert counts(model, "softmax_offset") == (heads, heads)


@has_sinks
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
            **plain(experts=experts, sequence_parallel=experts is not None),
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


@pytest.mark.parametrize("distributed_optimizer", [True, False])
@on_ranks(2)
def test_a_vocabulary_is_counted_once_without_initialization(distributed_optimizer: bool) -> None:
    model = built(
        **plain(distributed_optimizer=distributed_optimizer),
        config_overrides={"perform_initialization": False},
    )
    elements = model.vocabulary * model.config.hidden_size
    assert counts(model, "word_embeddings") == (elements, elements)


@pytest.mark.parametrize("distributed_optimizer", [True, False])
@on_ranks(2)
def test_a_weight_that_each_rank_has_whole_is_counted_once(distributed_optimizer: bool) -> None:
    """Megatron takes the mark itself from 0.17 on; before, the patch does."""

    def add(module: Any) -> None:
        module.down_projection = duplicated(module.config, 16)

    model = built(**plain(distributed_optimizer=distributed_optimizer), before_ddp=add)
    elements = 16 * model.config.hidden_size
    assert counts(model, "down_projection") == (elements, elements)
