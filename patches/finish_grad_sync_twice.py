"""A second `finish_grad_sync()` reduces gradients that are reduced already.

Symptom:
    Without overlap_grad_reduce the rank's shard of the gradient changes with every further
    `finish_grad_sync()`, or `finalize_model_grads`, in one window: wrong gradients with the
    distributed optimizer, per-token loss or expert parallelism; no error. With overlap, before
    0.18: `AssertionError: Communication call has not been issued for this bucket`.

Cause:
    The bucket groups keep no record of having been reduced. Release 0.18 added one for the path
    with overlap.

Affects:
    Every release. What the patch does: `finish_grad_sync` does nothing where no gradient was added
    since the last one. Without overlap it goes by torch's counters of writes in place; gradients
    that anything has written to in between, clipping for one, count as added.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.finish_grad_sync`.

Remove when:
    `finish_grad_sync` is idempotent within a window without overlap too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Patch, Reproduction

from . import _reduction
from ._ddp import GROUP_UPSTREAM, bucket_groups, ddp_target

_windows = _reduction.Windows("finished")


def finish_grad_sync(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Reduce once, and again only where there is something new."""
    if _windows.reduced(self) is not None and not _windows.grown(self):
        for group in bucket_groups(self):
            group.param_gather_dispatched = False  # as upstream does at every call
        return
    original(self, *args, **kwargs)
    _windows.finished(self)


def no_sync(original: Callable[..., Any], self: Any) -> Any:
    """Remember that hooks may have added gradients without registering them."""
    _windows.entered_no_sync(self)
    return original(self)


def zero_grad_buffer(original: Callable[..., None], self: Any) -> None:
    """Start a window whose gradients are not reduced."""
    _windows.began(self)
    original(self)


def reproduce() -> None:
    """One window, reduced by its schedule, then `finish_grad_sync` once more."""
    import torch

    from megatron_idempotent.cpu import tiny

    model = tiny.build(overlap_grad_reduce=False)
    model.forward_backward(2, data_seed=0)
    once = model.gradients()
    for chunk in model.chunks:
        chunk.finish_grad_sync()
    if not torch.equal(model.gradients(), once):
        raise RuntimeError("a second finish_grad_sync() changed the gradients")


PATCH = Patch(
    id="finish-grad-sync-twice",
    summary="a second finish_grad_sync() reduces the gradients again: wrong values",
    since="0.12",
    before="0.20",
    targets=(
        ddp_target("finish_grad_sync", finish_grad_sync),
        ddp_target("no_sync", no_sync),
        ddp_target("zero_grad_buffer", zero_grad_buffer),
    ),
    upstream=GROUP_UPSTREAM,
    reproduction=Reproduction(
        run=reproduce,
        ranks=2,
        stock_error=r"RuntimeError: a second finish_grad_sync\(\) changed the gradients",
    ),
)
