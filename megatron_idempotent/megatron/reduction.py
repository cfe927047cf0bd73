"""Tracks when the gradients of a chunk in Megatron's DDP were reduced.

A window's gradients are local until `finish_grad_sync` and reduced afterwards, until
`zero_grad_buffer`. Upstream keeps no record of which.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import arrivals
from megatron_idempotent.megatron.ddp import bucket_groups

#: Set on bucket groups where replicas are compared: reductions in this window, and whether
#: parameters are those of the latest step on all ranks.
REDUCTIONS = "_megatron_idempotent_reductions"
GATHERED = "_megatron_idempotent_gathered"
_REDUCED = "_megatron_idempotent_reduced"


def reduced(chunk: Any) -> tuple[int, ...] | None:
    """The `versions` of the chunk's gradients as they were reduced; None before that in a window"""
    found: tuple[int, ...] | None = getattr(chunk, _REDUCED, None)
    return found


def grown(chunk: Any) -> bool:
    """True if gradients were added to reduced ones, or their reduction was dispatched again."""
    before = reduced(chunk)
    if before is None:
        return False
    if chunk.ddp_config.overlap_grad_reduce:
        return any(
            arrivals.arrived(group, _REDUCED) is not None or arrivals.dispatched(group)
            for group in bucket_groups(chunk)
        )
    # No hook tells. Clipping and scaling write too, and count as gradients.
    return versions(chunk) != before or _replays(chunk.config)


def is_idle(chunk: Any) -> bool:
    """True if all of the chunk's gradients are reduced."""
    return reduced(chunk) is not None and not grown(chunk)


def finished(chunk: Any) -> None:
    """Records that all gradients are reduced now; to be called after `finish_grad_sync`."""
    setattr(chunk, _REDUCED, versions(chunk))
    arrivals.ended(chunk)
    if chunk.ddp_config.overlap_grad_reduce:
        for group in bucket_groups(chunk):
            arrivals.watch(group, _REDUCED)


def began(chunk: Any) -> None:
    """Belongs to `zero_grad_buffer`: a window whose gradients are not reduced."""
    setattr(chunk, _REDUCED, None)
    arrivals.ended(chunk)
    for group in bucket_groups(chunk):
        arrivals.unwatch(group, _REDUCED)


def _replays(config: Any) -> bool:
    """Returns whether CUDA graphs may write gradients, which torch's counters do not see."""
    return bool(
        getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False)
        or getattr(config, "cuda_graph_impl", "none") != "none"
    )


def registered(group: Any) -> dict[Any, int]:
    """Returns how often each parameter's gradient came in armed backward passes since `reset`."""
    counts = getattr(group, "per_param_grad_ready_counts", None)
    # Releases before 0.16 keep a set, because they allow one gradient per parameter.
    return dict.fromkeys(group.params_with_grad, 1) if counts is None else counts


def drop_registered(group: Any) -> None:
    """Restarts the count of gradients."""
    if hasattr(group, "params_with_grad"):
        group.params_with_grad = set()
    else:
        group.per_param_grad_ready_counts = {}


def start_held(chunk: Any, *args: Any, **kwargs: Any) -> None:
    """Dispatch what `no_sync` has held back, as `finish_grad_sync` expects to find it.

    Not in a first batch, where that dispatches; without a handle it would do so a second time.
    """
    for group in bucket_groups(chunk):
        if not getattr(group, "is_first_batch", False):
            group.start_grad_sync(*args, **kwargs)


def wait(chunk: Any) -> None:
    """Let the reductions in flight end; what they write is of no use any more."""
    for group in bucket_groups(chunk):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def name_of(chunk: Any, param: Any) -> str:
    """The parameter's name in the wrapped module, for messages."""
    names = (name for name, other in chunk.module.named_parameters() if other is param)
    return next(names, "?")


def gradients(chunk: Any) -> list[Any]:
    """The tensors that hold the chunk's gradients."""
    return [
        tensor
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        for tensor in (buffer.grad_data, *getattr(buffer, "extra_main_grads", ()))
    ]


def versions(chunk: Any) -> tuple[int, ...]:
    """torch's counters of writes in place into the gradients, reductions included."""
    return tuple(tensor._version for tensor in gradients(chunk))
