"""Measures by how much rounding moves a gradient, if the roundings are independent of each other.

Worst-case bounds, as `tests/step/roundings.py` has them, say nothing of bfloat16: where each
rounding is the worst that it can be for all others, the gradient is lost. Roundings are not so:
here each result of each operation, forward and backward, is off by independent signs of full size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose results are copies of what there is, bit for bit.
_COPIES = ("view", "expand", "t.", "transpose", "permute", "slice", "select", "clone", "detach")
_COPIES += ("index.Tensor", "masked_fill", "roll", "gather", "zero", "new_", "full", "ones", "copy")
_COPIES += ("unsqueeze", "squeeze", "neg", "alias", "reshape", "_to_copy", "empty", "fill")
_COPIES += ("cat", "lift_fresh", "split")


class _Rounded(TorchDispatchMode):
    """Changes all results of floating point by `size` times their own size, either way."""

    def __init__(self, size: float, generator: torch.Generator) -> None:
        super().__init__()
        self._size, self._generator = size, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if name.startswith(_COPIES):
            return found
        if isinstance(found, tuple):
            return tuple(self._changed(each) for each in found)
        return self._changed(found)

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._generator).to(value) * 2 - 1
        return value + self._size * signs * value


def off(compute: Callable[[], Tensor], size: float, samples: int = 8) -> float:
    """Return the root mean square of what `compute`'s result is off by, as a part of its norm.

    Example: `off(gradient, 2.0**-8)` of bfloat16.
    """
    right = compute()
    generator = torch.Generator().manual_seed(0)
    squares = 0.0
    for _ in range(samples):
        with _Rounded(size, generator):
            found = compute()
        squares += float((found - right).square().sum())
    return float((squares / samples) ** 0.5 / right.norm())
