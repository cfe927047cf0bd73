"""A training call of a schedule that accumulates, and reduces and finalizes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from megatron.core.utils import get_model_config

from megatron_idempotent.megatron import fsdp, reduction


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
            functions = [chunk.no_sync for chunk in chunks if _overlaps(chunk)]
        for function in functions if isinstance(functions, list) else [functions]:
            stack.enter_context(function())
        # The schedule leaves its own no_sync context for the last microbatch.
        set_for(stack, config, "no_sync_func", nullcontext)
        set_for(stack, config, "grad_sync_func", None)
        # Not None: the schedules would leave out the deferred embedding gradient with it.
        set_for(stack, config, "finalize_model_grads_func", instead_of_finalize)


def start_held(chunk: Any) -> None:
    """Dispatch the reductions that were held back, after the last backward of a step.

    Raises:
        RuntimeError: Megatron-FSDP reduces over two groups in turn, which only a backward does.
    """
    if not fsdp.is_wrapped(chunk):
        reduction.start_held(chunk)
        return
    wrapped = chunk.module
    if wrapped.dist_index.use_hybrid_fsdp:
        raise RuntimeError(
            "the step ends after its last backward, and Megatron-FSDP over two groups (hybrid) "
            "reduces in a backward only: say the total before the last call, as in "
            "accumulation_window(chunks, total_microbatches)"
        )
    if wrapped.data_parallel_sharding_strategy in ("no_shard", "optim"):  # others never hold back
        groups = wrapped.param_and_grad_buffer.parameter_groups
        held = [each for group in groups if group.requires_grad for each in group.params]
        wrapped.grad_reduce_pipeline.reduce_gradients(held)


def _overlaps(chunk: Any) -> bool:
    """Returns whether a backward of the chunk may start reductions.

    Where it did not, Megatron-FSDP's `no_sync()` would turn that on for later backwards.
    """
    options = getattr(chunk, "ddp_config", None)
    return hasattr(chunk, "no_sync") and getattr(options, "overlap_grad_reduce", True)


def set_for(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
