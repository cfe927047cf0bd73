"""Experts that are split differently from the other layers get other ranks' gradients.

Symptom:
    With `expert_model_parallel_size=1` and an `expert_tensor_parallel_size` that is not the
    `tensor_model_parallel_size`, experts are trained on wrong gradients. With 2 over 1 each half of
    an expert gets the mean of both halves' gradients, and the gradient of a small model is off by
    62 % of its norm; with 1 over 2 the copies of an expert drift apart. No error.

Cause:
    Megatron marks experts' weights for DDP and the optimizer only with more than one
    expert-parallel rank. Without the mark they are reduced over the data-parallel ranks of the
    dense weights. If experts are split differently, these are not the ranks that hold the same part
    of an expert.

Affects:
    0.12 to 0.18; 0.19 compares both sizes. What the patch does: if the two sizes differ and expert
    parallelism is off, MoE layers mark the weights of their experts, and DDP marks those of
    adapters in experts. Nothing else changes. On 0.12 experts with 1 over 2 raise in the forward:
    `expert-layers-in-dense-collectives` repairs that.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.18.0/megatron/core/tensor_parallel/layers.py,
    `expert_parallel = config.expert_model_parallel_size > 1`.
    https://github.com/NVIDIA/Megatron-LM/pull/5916, "Fix gradient-norm undercounting when using EP
    and TP", repairs it for experts with one expert-parallel rank, its "uncommon case".

Remove when:
    no supported release marks experts' weights by the expert-parallel size alone.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, arguments, bench, gathered, target


def layer(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Build an MoE layer; mark its experts' weights if their TP size is not that of dense layers.

    It marks them here because, from 0.18 on, buffers may be laid out before DDP wraps the model.
    """
    original(self, config, *args, **kwargs)
    if _split_otherwise(config):
        _mark(self)


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DDP's constructor: first mark experts' weights that were created after their layer."""
    call = arguments(original, (self, *args), kwargs)
    if _split_otherwise(call["config"]):
        _mark_experts(call["module"])
    original(self, *args, **kwargs)


def _split_otherwise(config: Any) -> bool:
    """Return whether, with EP 1, experts are split over another number of tensor-parallel ranks
    than dense layers. Copies of an expert's shard are then on other ranks than copies of a dense
    shard.
    """
    split = getattr(config, "expert_tensor_parallel_size", None)
    return (
        split not in (None, config.tensor_model_parallel_size)
        and config.expert_model_parallel_size == 1
    )


def _mark_experts(model: Any) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for part in model.modules():
        if isinstance(part, MoELayer):
            _mark(part)


def _mark(moe_layer: Any) -> None:
    """Mark experts' weights as Megatron does with more than one expert-parallel rank."""
    for parameter in moe_layer.experts.parameters():
        parameter.allreduce = False


def reproduce() -> None:
    """Compare the gradients of the two halves of an expert on two ranks, which must differ.
    On stock Megatron both halves have the mean of their two gradients.
    """
    import torch

    model = bench(etp=2, experts=2, distributed_optimizer=False, overlap_grad_reduce=False, seed=5)
    model.forward_backward(1, data_seed=0)
    (chunk,) = model.chunks
    gradient = (
        chunk.module.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight.main_grad
    )
    if torch.equal(*gathered(gradient)):
        raise Fault("the two halves of an expert have one gradient, which is their mean")


PATCH = Patch(
    "with EP 1 and another ETP than TP, experts get the gradients of other ranks' parts",
    target("ddp.__init__", init, "super().__init__(config=config, module=module)"),
    target("moe.moe_layer:MoELayer.__init__", layer, "self.experts"),
    before="0.19",
    fixed_by=(
        (
            address("layers.ColumnParallelLinear.__init__"),
            "setattr(self.weight, 'allreduce', not use_expert_pgs)",
        ),
    ),
)
