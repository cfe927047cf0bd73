"""A second `finish_grad_sync()` reduces gradients that are already reduced.

Symptom:
    Without overlap_grad_reduce the rank's shard of the gradient changes with every further
    `finish_grad_sync()`, or `finalize_model_grads`, in one window: wrong gradients with the
    distributed optimizer, per-token loss or expert parallelism; no error. With overlap, before
    0.18: `AssertionError: Communication call has not been issued for this bucket`.

Cause:
    The bucket groups do not record that they were reduced. Release 0.18 added such a record for the
    path with overlap.

Affects:
    Every release. What the patch does: `finish_grad_sync` does nothing if no gradient was added
    since the last call. Without overlap it compares torch's counters of writes in place; gradients
    that were written in between, for example by clipping, count as added.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.finish_grad_sync`.

Remove when:
    `finish_grad_sync` is idempotent within a window, even without overlap.
    `upstream/finish-grad-sync-twice` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Fault, Original, Patch, address, bench, target


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `finish_grad_sync`: do nothing if no gradient was added since the last reduction."""
    if ddp.is_idle(self):
        for group in ddp.bucket_groups(self):
            # As upstream does at every call.
            group.param_gather_dispatched = False
            if hasattr(group, "_copy_back_extra_main_grads"):
                group._copy_back_extra_main_grads()
        return
    original(self, *args, **kwargs)
    ddp.finished(self)


def start_all(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a chunk's `start_grad_sync`: without overlap, reduce only if there are new gradients."""
    if self.ddp_config.overlap_grad_reduce:
        original(self, *args, **kwargs)
    elif not ddp.is_idle(self):
        original(self, *args, **kwargs)
        ddp.finished(self)


def start(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a bucket group's `start_grad_sync`: do nothing if its reduction is in flight already."""
    if self.ddp_config.overlap_grad_reduce and ddp.dispatched(self) and ddp.late(self) is None:
        return
    ddp.dispatching(original, self, *args, **kwargs)


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: also record that the chunk's new gradients are not reduced yet."""
    original(self)
    ddp.began(self)


def reproduce() -> None:
    """Run a window, which reduces its gradients, and call `finish_grad_sync()` once more.
    On stock Megatron without overlap this changes the gradients.
    """
    model = bench(overlap_grad_reduce=False)
    model.forward_backward(2, data_seed=0)
    reduced = model.gradients()
    for chunk in model.chunks:
        chunk.finish_grad_sync()
    if not model.gradients().equal(reduced):
        raise Fault("a second finish_grad_sync() changed the gradients")


PATCH = Patch(
    "a second finish_grad_sync() reduces the gradients again: wrong values",
    target("ddp.finish_grad_sync", finish_grad_sync),
    target("ddp.start_grad_sync", start_all),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("group.start_grad_sync", start),
    groups=("overlap",),
    fixed_by=(
        (
            address("ddp.finish_grad_sync"),
            "bucket_group.grad_reduce_finished and not self.ddp_config.overlap_grad_reduce",
        ),
    ),
    loudness="both",
)
