"""The gradient norm leaves out the attention sinks of all but the first tensor-parallel rank.

Symptom:
    With learnable attention sinks (`softmax_type="learnable"`, GPT-OSS) and tensor parallelism, the
    gradient norm, clipping and the number of zeros count the sinks of the first rank's heads only.
    No error.

Cause:
    The attention registers `softmax_offset`, with a value for each of this rank's heads, and does
    not mark it `tensor_model_parallel`. Megatron takes an unmarked parameter for a copy of the
    first rank's.

Affects:
    0.15 on, which brought sinks. What the patch does: before DDP wraps the model, it marks the
    sinks as a shard, in Megatron's attention and in Transformer Engine's. No collective is added.
    Call `apply()` before DDP. Megatron-FSDP is left as it is.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 8;
    https://github.com/NVIDIA/Megatron-LM/pull/7530 marks them in both attentions.

Remove when:
    both attentions mark their sinks. `upstream/attention-sinks-uncounted` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.optimizers import mark_part

from ._case import Fault, Original, Patch, address, arguments, bench, counted, target


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DDP's constructor: first mark a model's attention sinks as tensor-parallel shards."""
    call = arguments(original, (self, *args), kwargs)
    if call["config"].tensor_model_parallel_size > 1:
        for sinks in _sinks(call["module"]):
            if not getattr(sinks, "tensor_model_parallel", False):
                mark_part(sinks, 0)
    original(self, *args, **kwargs)


def _sinks(model: Any) -> list[Any]:
    """Return the learnable sink parameters of a model's attention layers."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] == "softmax_offset"
    ]


def reproduce() -> None:
    """Set the gradients of attention sinks on two tensor-parallel ranks to 1, and take the norm.
    On stock Megatron the norm counts the sinks of the first rank only.
    """
    model = bench(
        tp=2,
        dtype="bf16",
        overlap_grad_reduce=False,
        config_overrides={"softmax_type": "learnable"},
    )
    number = counted(model, "softmax_offset")
    elements = 2 * sum(sinks.numel() for sinks in _sinks(model.chunks[0]))
    if number != elements:
        raise Fault(f"the norm has {number} of {elements} sinks")


_ATTENTION = "core.transformer.dot_product_attention:DotProductAttention.__init__"

PATCH = Patch(
    "the gradient norm leaves out attention sinks of other than the first tensor-parallel rank",
    target("ddp.__init__", init, "super().__init__(config=config, module=module)"),
    since="0.15",
    came_with=(address(_ATTENTION), "self.config.softmax_type"),
    fixed_by=(
        (
            address("core.transformer.dot_product_attention:DotProductAttention.__init__"),
            "tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)",
        ),
    ),
)
