"""A bias that is trained beside a frozen weight gets no gradient.

Symptom:
    Where biases are trained and weights are frozen, those of `linear_qkv`, and of the output layer
    if it has one, stay as they are, and nothing says so. With overlap_grad_reduce the first
    backward raises `AssertionError: param.grad being None is not safe when overlap_grad_reduce is
    True`.

Cause:
    A column-parallel layer whose weight is frozen is computed by a function of its own. It adds the
    bias in its forward, and its backward returns no gradient of it.

Affects:
    0.12 to 0.19, and main of August 2026. What the patch does: where the bias requires a gradient,
    it is added to what the function returns. The sum has the same bits.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/layers.py,
    `LinearWithFrozenWeight.backward`.

Remove when:
    `LinearWithFrozenWeight.backward` returns the gradient of the bias.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, arguments, bench, target


def linear(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Compute the product alone, and add the bias where autograd sees it."""
    given = arguments(original, args, kwargs)
    bias = given["bias"]
    if bias is None or not bias.requires_grad:
        return original(*args, **kwargs)
    return original(**{**given, "bias": None}) + bias


def reproduce() -> None:
    """Train the biases of attention alone, and look for their gradients."""

    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith("linear_qkv.bias"))

    model = bench(tp=2, before_ddp=freeze, overlap_grad_reduce=False)
    model.forward_backward(1, data_seed=0)
    still = [
        name
        for name, parameter in model.chunks[0].module.named_parameters()
        if parameter.requires_grad and not parameter.main_grad.any()
    ]
    if still:
        raise Fault(f"{len(still)} biases have no gradient, the first is {still[0]}")


PATCH = Patch(
    "a bias that is trained beside a frozen weight gets no gradient",
    target("layers.linear_with_frozen_weight", linear, "LinearWithFrozenWeight.apply(*args)"),
)
