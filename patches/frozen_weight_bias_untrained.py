"""A bias that is trained beside a frozen weight gets no gradient.

Symptom:
    If biases are trained and weights are frozen, the biases of `linear_qkv`, and of the output
    layer if it has one, silently stay unchanged. With overlap_grad_reduce the first backward raises
    `AssertionError: param.grad being None is not safe when overlap_grad_reduce is True`.

Cause:
    A column-parallel layer with a frozen weight is computed by a separate autograd function. It
    adds the bias in its forward, but its backward returns no gradient for it.

Affects:
    0.12 to 0.19, and main of August 2026. What the patch does: if the bias requires a gradient, it
    is added to the function's result. The sum has the same bits.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/layers.py,
    `LinearWithFrozenWeight.backward`.

Remove when:
    `LinearWithFrozenWeight.backward` returns the gradient of the bias.
    `upstream/frozen-weight-bias-untrained` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, arguments, bench, target


def linear(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap the product with a frozen weight: leave out a trained bias, and add it to the result.
    The product's own backward returns no gradient of a bias.
    """
    call = arguments(original, args, kwargs)
    bias = call["bias"]
    if bias is None or not bias.requires_grad:
        return original(*args, **kwargs)
    return original(**{**call, "bias": None}) + bias


def reproduce() -> None:
    """Train only the attention biases, and check that they have gradients.
    On stock Megatron biases of layers with frozen weights have no gradient.
    """

    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith("linear_qkv.bias"))

    model = bench(tp=2, before_ddp=freeze, overlap_grad_reduce=False)
    model.forward_backward(1, data_seed=0)
    untrained = [
        name
        for name, parameter in model.chunks[0].module.named_parameters()
        if parameter.requires_grad and not parameter.main_grad.any()
    ]
    if untrained:
        raise Fault(f"{len(untrained)} biases have no gradient, the first is {untrained[0]}")


PATCH = Patch(
    "a bias that is trained beside a frozen weight gets no gradient",
    target("layers.linear_with_frozen_weight", linear, "LinearWithFrozenWeight.apply(*args)"),
    fixed_by=((address("layers.LinearWithFrozenWeight.backward"), "ctx.needs_input_grad[2]"),),
    loudness="both",
)
