"""A window of one microbatch cannot compute its deferred embedding gradient.

Symptom:
    With `defer_embedding_wgrad_compute`, `UnboundLocalError: cannot access local variable
    'drain_idx' where it is not associated with a value`, in
    `wgrad_compute(all_gathered_input[drain_idx], grad_output, weight)`, at the end of a window of
    one microbatch, or with `wgrad_deferral_limit` of 1. The gradient of the output layer is lost.

Cause:
    The loop over all microbatches but the last sets the variable; with one microbatch it never
    runs.

Affects:
    Every release. What the patch does: if one microbatch is kept, the patch adds a second one of
    zeros, which does not change the sum.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/utils.py,
    `drain_embedding_wgrad_compute`.

Remove when:
    `drain_embedding_wgrad_compute` sets `drain_idx` before its loop.
    `upstream/deferred-embedding-one-microbatch` has the repair.
"""

from __future__ import annotations

from typing import Any

from . import _deferred_embedding
from ._case import Fault, Original, Patch, address, bench, target


def drain(
    original: Original,
    config: Any,
    embedding_activation_buffer: list[Any],
    grad_output_buffer: list[Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap the computation of the deferred gradient: to a single microbatch, append one of zeros.
    Upstream's loop fails with a single microbatch.
    """
    import torch

    lists = embedding_activation_buffer, grad_output_buffer
    if all(len(items) == 1 for items in lists):
        for items in lists:
            # One row is enough; a gather over the sequence needs the shape of the first microbatch.
            items.append(torch.zeros_like(items[0] if config.sequence_parallel else items[0][:1]))
    original(config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs)


def reproduce() -> None:
    """Compare gradients of a window of one microbatch, deferred and not.
    On stock Megatron the computation of the deferred gradient raises `UnboundLocalError`.
    """
    # Without overlap, see deferred-embedding-reduced-early.
    plain = bench(pp=2, overlap_grad_reduce=False)
    plain.forward_backward(1, data_seed=0)
    deferred = _deferred_embedding.build(overlap_grad_reduce=False)
    deferred.forward_backward(1, data_seed=0)
    if not plain.gradients().equal(deferred.gradients()):
        raise Fault("the deferred gradient differs from the one computed at once")


PATCH = Patch(
    "a window of one microbatch raises instead of computing a deferred embedding gradient",
    target("utils.drain_embedding_wgrad_compute", drain),
    groups=("deferred-embedding",),
    fixed_by=((address("utils.drain_embedding_wgrad_compute"), "drain_idx = 0"),),
    provides=("deferred-embedding-drained",),
    stock_error=r"UnboundLocalError: .*'drain_idx'",
)
