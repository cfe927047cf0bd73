"""Multiplies hidden states by a weight, part by part, and adds up gradients of the weight.

Legend: H features, V columns of the vocabulary on this rank; n some tokens, v some columns.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from .statistics import accumulated


class Product:
    """Multiplies matrices into memory that each product uses again."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def __call__(self, left_nH: Tensor, right_Hv: Tensor) -> Tensor:
        """Multiply two matrices into this object's memory; return the product [n, v].
        The next call overwrites it.
        """
        shape = len(left_nH), right_Hv.shape[1]
        size = shape[0] * shape[1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = left_nH.new_empty(size)
        return torch.mm(left_nH, right_Hv, out=self._memory[:size].view(shape))


class WeightGradient:
    """Adds up the gradient of a weight [V, H], from products of a few columns or a few tokens.

    Args:
        weight_VH: the weight.
        needed: False to add up nothing.
        fused: the parameter to whose `main_grad` the gradient is added; None to return it.
        written: the number of rows, from the first on, that have a product; others stay zero.
        parts: the number of products that add up in each of these rows.
    """

    def __init__(
        self, weight_VH: Tensor, needed: bool, fused: Any, *, written: int = 0, parts: int = 1
    ) -> None:
        self._weight_VH, self._fused = weight_VH, fused if needed else None
        self._sum: Tensor | None = None
        # One product is rounded once, to the type of the result; several are summed in float32.
        self._adds = fused is not None or parts > 1
        exact = accumulated(weight_VH.dtype)
        if self._fused is not None and (parts <= 1 or fused.main_grad.dtype == exact):
            self._sum = fused.main_grad
        elif needed and self._adds:
            self._sum = torch.zeros_like(weight_VH, dtype=exact)
        elif needed:
            self._sum = torch.empty_like(weight_VH)
            self._sum[written if parts else 0 :].zero_()

    def add(self, rows: slice | Tensor, d_logits_nv: Tensor, hidden_nH: Tensor) -> None:
        """Add the product of some tokens' logit gradients [n, v] and hidden states [n, H] to the v
        rows `rows` of the weight's gradient; if each row gets one product only, store it there.
        """
        if self._sum is None:
            return
        if isinstance(rows, slice):
            product_into(self._sum[rows], d_logits_nv.t(), hidden_nH, add=self._adds)
            return
        product_vH = (d_logits_nv.t() @ hidden_nH).to(self._sum.dtype)
        if self._adds:
            self._sum.index_add_(0, rows, product_vH)
        else:
            self._sum[rows] = product_vH

    def finish(self) -> Tensor | None:
        """Return the weight's gradient for autograd: None if it is not needed, zeros if it was
        added to `main_grad`.
        """
        if self._sum is None:
            return None
        parameter = self._fused
        if parameter is None:
            return self._sum.to(self._weight_VH.dtype)
        if self._sum is not parameter.main_grad:
            parameter.main_grad.add_(self._sum)
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
        # Zeros, because autograd adds a tied weight's other gradient to this one, and DDP's hook
        # needs a gradient.
        return torch.zeros_like(self._weight_VH)


def product_into(
    into: Tensor, left_factor: Tensor, right_factor: Tensor, *, add: bool = False
) -> Tensor:
    """Write the product of two matrices to `into`, or with `add` add the product to it, and return
    `into`.

    `into` may be of float32 while the factors have 16 bits.
    """
    beta = int(add)
    if into.dtype == left_factor.dtype:
        return torch.addmm(into, left_factor, right_factor, beta=beta, out=into)
    if into.device.type == "cuda":
        # Named in a text: cloudpickle pickles `torch.ops` as a module, and fails, if a function has
        # `ops` among its names. From PyTorch 2.8 on this overload exists; it sums in float32, and
        # rounds to 16 bits once.
        widened = getattr(operator.attrgetter("ops.aten.addmm")(torch), "dtype_out", None)
        if widened is not None:
            widened(into, left_factor, right_factor, into.dtype, beta=beta, out=into)
            return into
    product = left_factor @ right_factor
    return into.add_(product) if add else into.copy_(product)
