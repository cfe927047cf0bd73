"""Without initialization the gradient norm leaves out the layers of most tensor-parallel ranks.

Symptom:
    A model is built with `perform_initialization=False`, because its weights come from a
    checkpoint: Megatron-Bridge does so for `load_weights=True`, and ms-swift by default. With
    tensor parallelism the gradient norm, clipping and the number of zeros count the embedding, the
    output layer and each layer that is not Transformer Engine's on the first rank alone: in a small
    model 61,184 of 118,528 elements. No error.

Cause:
    Layers mark their weights `tensor_model_parallel` when they initialize them. Megatron takes an
    unmarked parameter for a copy of the first rank's.

Affects:
    0.12 to 0.17. What the patch does: before DDP wraps the model, it marks the weights of
    Megatron's own column-parallel, row-parallel and embedding layers as initialization does. No
    collective is added. Call `apply()` before DDP. Megatron-FSDP is left as it is.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/4084 repairs it in 0.18.

Remove when:
    no supported release marks weights only when it initializes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_idempotent.megatron.optimizers import mark_part

from ._case import Fault, Original, Patch, address, arguments, bench, counted, target


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DDP's constructor: first mark the weights that tensor-parallel ranks split."""
    call = arguments(original, (self, *args), kwargs)
    for weight, dimension in _parts(call["module"]):
        if not getattr(weight, "tensor_model_parallel", False):
            mark_part(weight, dimension)
    original(self, *args, **kwargs)


def _parts(model: Any) -> Iterator[tuple[Any, int]]:
    """Yield (weight, dimension along which tensor-parallel ranks split it) for a model's layers."""
    from megatron.core.tensor_parallel import layers

    dimensions = {
        layers.VocabParallelEmbedding: 0,
        layers.ColumnParallelLinear: 0,
        layers.RowParallelLinear: 1,
    }
    for layer in model.modules():
        for kind, dimension in dimensions.items():
            # An output layer that is tied to the embedding has no own weight.
            if isinstance(layer, kind) and layer.weight is not None:
                yield layer.weight, dimension


def reproduce() -> None:
    """Count the elements in the gradient norm, with and without `perform_initialization`.
    On stock Megatron the norm without it counts only the first rank's shards.
    """
    counts = []
    for initialized in (True, False):
        model = bench(
            tp=2,
            dtype="bf16",
            overlap_grad_reduce=False,
            config_overrides={"perform_initialization": initialized},
        )
        counts.append(counted(model))
    right, number = counts
    if number != right:
        raise Fault(f"without initialization the norm has {number} of {right} elements")


PATCH = Patch(
    "without initialization the norm leaves out weights of other than the first tensor rank",
    target("ddp.__init__", init, "super().__init__(config=config, module=module)"),
    before="0.18",
    fixed_by=(
        (
            address("layers.VocabParallelEmbedding.__init__"),
            "set_tensor_model_parallel_attributes("
            "tensor=self.weight, is_parallel=True, dim=0, stride=1)",
        ),
    ),
)
