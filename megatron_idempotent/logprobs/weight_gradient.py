"""The gradient of the output layer's weight: its own tensor, or straight into `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .asked import accumulated


class WeightGradient:
    """Gradient of a weight [V, H], some rows at a time; adds each of the first `written` once."""

    def __init__(self, weight_VH: Tensor, needed: bool, fused: bool, written: int = 0) -> None:
        self._weight_VH, self._fused = weight_VH, needed and fused
        self._own: Tensor | None = None
        if needed:
            # A gradient that is already in main_grad comes back as zeros, because weights that are
            # tied to another layer's have theirs added to it, and DDP's hook wants one.
            self._own = torch.empty_like(weight_VH)
            self._own[0 if fused else written :].zero_()

    def add(self, rows: slice | Tensor, d_logits_Nv: Tensor, hidden_NH: Tensor) -> None:
        """Adds the part of these columns of the logits. Each row is added once."""
        if self._own is None:
            return
        if self._fused:
            main_grad: Tensor = self._weight_VH.main_grad  # type: ignore[attr-defined]
            if isinstance(rows, slice) and main_grad.dtype == hidden_NH.dtype:
                main_grad[rows].addmm_(d_logits_Nv.t(), hidden_NH)
                return
            product_vH = d_logits_Nv.t() @ hidden_NH
            if isinstance(rows, slice):
                main_grad[rows] += product_vH
            else:
                main_grad.index_add_(0, rows, product_vH.to(main_grad.dtype))
        elif isinstance(rows, slice):
            torch.mm(d_logits_Nv.t(), hidden_NH, out=self._own[rows])
        else:
            self._own[rows] = d_logits_Nv.t() @ hidden_NH

    def done(self) -> Tensor | None:
        """Returns the gradient for autograd."""
        if self._fused and hasattr(self._weight_VH, "grad_added_to_main_grad"):
            self._weight_VH.grad_added_to_main_grad = True
        return self._own


class SummedWeightGradient:
    """Gradient of a whole weight [V, H], a few tokens at a time: a sum of products in float32."""

    def __init__(
        self, weight_VH: Tensor, needed: bool, fused: bool, written: int, parts: int
    ) -> None:
        self._weight_VH, self._fused = weight_VH, needed and fused
        self._sum: Tensor | None = None
        self._into_main_grad = False
        if not needed:
            return
        like = weight_VH
        if fused:
            main_grad: Tensor = weight_VH.main_grad  # type: ignore[attr-defined]
            self._into_main_grad = main_grad.dtype == accumulated(like.dtype)
            if self._into_main_grad:
                self._sum = main_grad[:written]
                return
        # One product is rounded once, straight to what autograd is given.
        dtype = like.dtype if parts <= 1 and not fused else accumulated(like.dtype)
        self._sum = torch.zeros(written, like.shape[1], dtype=dtype, device=like.device)

    def add(self, d_logits_nV: Tensor, hidden_nH: Tensor) -> None:
        """Adds the part of these tokens."""
        if self._sum is not None:
            product_into(self._sum, d_logits_nV.t(), hidden_nH, add=True)

    def done(self) -> Tensor | None:
        """Returns the gradient for autograd."""
        if self._sum is None:
            return None
        written = len(self._sum)
        if not self._fused:
            if written == len(self._weight_VH):
                return self._sum.to(self._weight_VH.dtype)
            own = torch.zeros_like(self._weight_VH)
            own[:written] = self._sum
            return own
        if not self._into_main_grad:
            main_grad: Tensor = self._weight_VH.main_grad  # type: ignore[attr-defined]
            main_grad[:written] += self._sum
        if hasattr(self._weight_VH, "grad_added_to_main_grad"):
            self._weight_VH.grad_added_to_main_grad = True
        # Zeros, because weights that are tied to another layer's have theirs added to it.
        return torch.zeros_like(self._weight_VH)


def product_into(into: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> Tensor:
    """`left @ right`, written or added to what may be of float32 where they are of half of it."""
    beta = int(add)
    if into.dtype == left.dtype:
        return torch.addmm(into, left, right, beta=beta, out=into)
    widened = _widened_product() if into.is_cuda else None
    if widened is not None:
        # The product's own sums are of float32, and are not rounded to half of it in between.
        found: Tensor = widened(into, left, right, into.dtype, beta=beta, out=into)
        return found
    product = left @ right
    return into.add_(product) if add else into.copy_(product)


def _widened_product() -> Any:
    """The operator that multiplies into a wider type, from torch 2.8 on; None before."""
    # cloudpickle takes `torch.ops` for a module that a function needs, and cannot pickle it.
    from torch._ops import ops

    return getattr(ops.aten.addmm, "dtype_out", None)
