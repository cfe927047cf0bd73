"""Uses a step's own functions where its config holds those of another model on the same modules.

Wrappers over the same modules mostly have one config, whose functions are those of the DDP that was
wired last. With them a step would hold back the reductions of the other one and not its own, or
scale its loss for the other's optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from megatron_idempotent.megatron.optimizers import LossScale, parts
from megatron_idempotent.window.accumulation import set_for

# Field of the config → the method of DDP that belongs there.
_METHODS = {
    "no_sync_func": "no_sync",
    "grad_sync_func": "start_grad_sync",
    "param_sync_func": "start_param_sync",
}


def use_own_functions(
    stack: ExitStack, chunks: Sequence[Any], configs: Sequence[Any], optimizer: Any
) -> None:
    """Let configs call these chunks and this optimizer, and no others, until the stack is left.

    Functions that belong to neither a DDP nor an optimizer are the caller's, and stay.
    """
    for config in configs:
        for name, method in _METHODS.items():
            if _is_of_others(getattr(config, name), chunks):
                own = [getattr(chunk, method) for chunk in chunks]
                set_for(stack, config, name, own if len(own) > 1 else own[0])
        owner = _scaling(config.grad_scale_func)
        if owner is not None and all(owner is not part for part in parts(optimizer)):
            scale = None if optimizer is None else LossScale(optimizer)
            set_for(stack, config, "grad_scale_func", scale)


def _is_of_others(functions: Any, chunks: Sequence[Any]) -> bool:
    """Returns whether one of the functions is the method of a DDP that is not among the chunks."""
    for function in functions if isinstance(functions, list) else [functions]:
        owner = getattr(function, "__self__", None)
        if hasattr(owner, "bucket_groups") and all(owner is not chunk for chunk in chunks):
            return True
    return False


def _scaling(function: Any) -> Any:
    """Returns the optimizer whose loss scale the function applies; None if that is not known."""
    if isinstance(function, LossScale):
        return function.optimizer
    owner = getattr(function, "__self__", None)
    return owner if hasattr(owner, "scale_loss") else None
