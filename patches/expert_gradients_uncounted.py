"""The gradient norm leaves out experts on all but the first tensor-parallel ranks.

Symptom:
    With tensor parallelism and experts in grouped GEMM of Transformer Engine 2.13 or later, the
    gradient norm is too small and clipping too weak, for all parameters; `num_zeros` and the norm
    of the parameters lack the same experts. Experts' biases are left out in any implementation if
    experts are split differently from the other layers, and with the layer-wise optimizer.
    Upstream's test of TP 2, EP 2 reported 0.215 in place of 0.302. No error.

Cause:
    A parameter without the mark `tensor_model_parallel` counts on tensor-parallel rank 0 alone,
    because it is taken for a copy. Transformer Engine no longer marks the weights of its grouped
    layers, though each rank has a different part of an expert, or different experts. The bias of a
    row-parallel layer really is a copy, but only on the expert-tensor-parallel ranks that share an
    expert; the optimizer uses the rank of the dense tensor-parallel group.

Affects:
    0.12 to 0.18, which refuse experts' biases before 0.15; 0.19 with the layer-wise optimizer and
    biases. What the patch does: it marks the weights, and the biases of column-parallel layers, in
    Megatron's layers over Transformer Engine's before DDP wraps them, as Transformer Engine did
    before 2.13. An optimizer's copies of experts' parameters carry the mark of experts, and each
    counts on the first rank that has it. In Muon of 0.16 a grouped layer's split weight is then one
    matrix again. No collective is added. Call `apply()` before DDP and the optimizer. Process
    groups that are not in `parallel_state`, and Megatron-FSDP, are left as they are.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5916,
    https://github.com/NVIDIA/Megatron-LM/pull/6099 for the layer-wise optimizer,
    https://github.com/NVIDIA/TransformerEngine/pull/2678, which removed the marks.

Remove when:
    no supported release uses the dense tensor-parallel rank for an expert's parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_idempotent.megatron.optimizers import mark_part

from ._case import Fault, Original, Patch, address, arguments, bench, counted, gathered, target

#: Megatron's layer over Transformer Engine's → the dimension along which ranks split its weight.
_SPLIT = {
    "TEColumnParallelLinear": 0,
    "TEColumnParallelGroupedLinear": 0,
    "TERowParallelLinear": 1,
    "TERowParallelGroupedLinear": 1,
}


def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap DDP's constructor: first mark experts' parameters that tensor-parallel ranks split."""
    call = arguments(original, (self, *args), kwargs)
    config = call["config"]
    if config.tensor_model_parallel_size > 1 or (config.expert_tensor_parallel_size or 1) > 1:
        for layer, dimension in _split_layers(call["module"]):
            _mark(layer, dimension)
    original(self, *args, **kwargs)


def _split_layers(model: Any) -> Iterator[tuple[Any, int]]:
    """Yield (Transformer Engine layer of routed experts, dimension along which it is split)."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for layer in model.modules():
        if isinstance(layer, MoELayer):
            for part in layer.experts.modules():
                names = [kind.__name__ for kind in type(part).__mro__]
                dimension = next((_SPLIT[name] for name in names if name in _SPLIT), None)
                if dimension is not None:
                    yield part, dimension


def _mark(layer: Any, dimension: int) -> None:
    """Mark a layer's weights as shards, and its biases too if ranks split its output.
    A parameter that already has a mark keeps it.
    """
    kinds = "weight|bias" if dimension == 0 else "weight"
    for name, parameter in layer.named_parameters(recurse=False):
        if re.fullmatch(rf"({kinds})\d*", name) and not hasattr(parameter, "tensor_model_parallel"):
            mark_part(parameter, dimension)


def copy(original: Original, destination_tensor: Any, source_tensor: Any) -> None:
    """Copy a parameter's tensor-parallel marks to another one, and an expert's mark `allreduce`."""
    original(destination_tensor, source_tensor)
    if hasattr(source_tensor, "allreduce"):
        destination_tensor.allreduce = source_tensor.allreduce


def counts(original: Original, param: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether this rank counts a parameter in gradient norms.
    If several ranks have copies of an expert, only the first one of these ranks counts its
    parameters.
    """
    if getattr(param, "allreduce", True) or getattr(param, "tensor_model_parallel", False):
        return bool(original(param, *args, **kwargs))
    groups = dict(zip(("tp_group", "expert_tp_group"), args, strict=False)) | kwargs
    first = _is_first(groups.get("tp_group"), groups.get("expert_tp_group"))
    return bool(original(param, *args, **kwargs)) if first is None else first


def _is_first(tp_group: Any, expert_tp_group: Any) -> bool | None:
    """Return whether this rank is the first of the tensor-parallel ranks that share an expert.
    "First" means rank 0 of the expert-tensor-parallel group.

    None if the caller passes the expert group itself, or other groups than `parallel_state`.
    """
    from megatron.core import parallel_state

    if expert_tp_group is not None:
        return None
    dense = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    ranks = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    if ranks is None or tp_group not in (None, dense):
        return None
    return bool(ranks.rank() == 0)


#: Patterns for the names of experts' parameters, and of their biases that ranks replicate.
_EXPERTS, _BIASES = r"\.experts\.", r"\.experts\..*linear_fc2\.bias"
#: Each rank has a different expert, and one half of each other layer.
_LAYOUT: dict[str, Any] = {
    "tp": 2,
    "ep": 2,
    "etp": 1,
    "experts": 2,
    "sequence_parallel": True,
    "overlap_grad_reduce": False,
    "dtype": "bf16",
}


def reproduce() -> None:
    """Count experts' elements in the gradient norm, for grouped layers and for biases.
    On stock Megatron the norm counts only experts on the first tensor-parallel ranks.
    """
    from megatron_idempotent.proof.cpu import tiny

    from ._engine_layers import group_experts

    _expect_counted(bench(**_LAYOUT, before_ddp=group_experts), _EXPERTS)
    layout = {**_LAYOUT, "config_overrides": {"add_bias_linear": True}}
    try:
        model = bench(**layout)
    except AssertionError as refusal:
        if "Bias is not supported for MoE" in str(refusal):
            return
        raise
    _expect_counted(model, _BIASES)
    if tiny.has_layer_wise():
        for by_layout in {False, tiny.has_layout()}:
            model = bench(**layout, layer_wise=True, distributed_optimizer=by_layout)
            _expect_counted(model, _BIASES)


def _expect_counted(model: Any, pattern: str) -> None:
    """Raise a `Fault` unless the norm and the number of zeros count all elements of parameters.
    The parameters are those whose names match `pattern`.

    The two ranks have different experts, so that all elements count.
    """
    import torch

    parameters = (pair for chunk in model.chunks for pair in chunk.named_parameters())
    sizes = [parameter.numel() for name, parameter in parameters if re.search(pattern, name)]
    elements = int(sum(gathered(torch.tensor([sum(sizes)], device="cuda"))))
    for zeros, quantity in ((False, "norm"), (True, "number of zeros")):
        number = counted(model, pattern, zeros=zeros)
        if number != elements:
            kind = type(model.optimizer).__name__
            raise Fault(
                f"the {quantity} of {kind} has {number} of {elements} elements of {pattern}"
            )


def control() -> list[float]:
    """Return norms and numbers of zeros of steps with ungrouped experts, as a control.
    Stock Megatron counts these correctly. The model also has shared experts, split like dense
    layers.
    """
    counted: list[float] = []
    for distributed_optimizer in (True, False):
        model = bench(
            **_LAYOUT,
            distributed_optimizer=distributed_optimizer,
            config_overrides={"moe_shared_expert_intermediate_size": 64},
            optimizer_overrides={"log_num_zeros_in_grad": True},
        )
        model.forward_backward(2, data_seed=0)
        _, norm, zeros = model.step()
        counted += [float(norm), float(zeros)]
    return counted


PATCH = Patch(
    "the gradient norm leaves out experts of other than the first tensor-parallel ranks",
    target("ddp.__init__", init, "super().__init__(config=config, module=module)"),
    target("layers.copy_tensor_model_parallel_attributes", copy),
    target("layers.param_is_not_tensor_parallel_duplicate", counts),
    # Upstream repaired the layer-wise optimizer last. miles' fork has it in other words, but there
    # the distributed optimizer's copies still lack the mark of experts.
    fixed_by=(
        (
            address("layer_wise.__init__"),
            "getattr(self.pg_collection, 'expt_tp', self.tp_group)",
        ),
    ),
)
