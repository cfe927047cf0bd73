"""A training call of a schedule that accumulates, and reduces and finalizes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from megatron.core.utils import get_model_config


def configs_of(chunks: Sequence[Any]) -> list[Any]:
    """The chunks' configs, each once: mostly there is one for all of them."""
    return list({id(config): config for config in map(get_model_config, chunks)}.values())


def hold_back(
    stack: ExitStack,
    chunks: Sequence[Any],
    configs: Sequence[Any],
    instead_of_finalize: Callable[..., None],
) -> None:
    """Until the stack is left, let no call of a schedule reduce or finalize gradients.

    `instead_of_finalize` gets what the schedule would have finalized with.
    """
    for config in configs:
        functions = config.no_sync_func
        if functions is None:
            functions = [chunk.no_sync for chunk in chunks if hasattr(chunk, "no_sync")]
        for function in functions if isinstance(functions, list) else [functions]:
            stack.enter_context(function())
        # The schedule leaves its own no_sync context for the last microbatch.
        set_for(stack, config, "no_sync_func", nullcontext)
        set_for(stack, config, "grad_sync_func", None)
        # Not None: the schedules would leave out the deferred embedding gradient with it.
        set_for(stack, config, "finalize_model_grads_func", instead_of_finalize)


def set_for(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
