"""Mark a backward that autograd cannot go through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Call torch's as late as possible: its wrapper holds what pickling by value cannot bring."""

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        return torch.autograd.function.once_differentiable(backward)(ctx, *gradients)

    return once
