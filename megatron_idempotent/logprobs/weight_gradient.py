"""The gradient of the output layer's weight: its own tensor, or straight into `main_grad`."""

from __future__ import annotations

import torch
from torch import Tensor


class WeightGradient:
    """Of a weight [V, H], a few rows at a time; of the first `written` ones each will be added."""

    def __init__(self, weight_VH: Tensor, needed: bool, fused: bool, written: int = 0) -> None:
        self._weight_VH, self._fused = weight_VH, needed and fused
        self._own: Tensor | None = None
        if needed:
            # A gradient that is already in main_grad comes back as zeros, because weights that are
            # tied to another layer's have theirs added to it, and DDP's hook wants one.
            self._own = torch.empty_like(weight_VH)
            self._own[0 if fused else written :].zero_()

    def add(self, rows: slice | Tensor, d_logits_Nv: Tensor, hidden_NH: Tensor) -> None:
        """What comes of these columns of the logits. Each row is added once."""
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
        """What autograd is given."""
        if self._fused and hasattr(self._weight_VH, "grad_added_to_main_grad"):
            self._weight_VH.grad_added_to_main_grad = True
        return self._own
