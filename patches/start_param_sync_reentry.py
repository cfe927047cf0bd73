"""`start_param_sync()` raises if a parameter gather is already in flight.

Symptom:
    A bare `AssertionError` from `start_param_sync`, in `assert self.param_gather_handle is None`:
    if it is called twice, or after a forward that was aborted half-way, which leaves the gather of
    the next bucket in flight. With align_param_gather the schedule itself calls it at every
    window's start. Without align_param_gather a pre-hook raises the same assertion after a window
    whose forward left a bucket unused.

Cause:
    The bucket group asserts that it has no handle, and only the pre-hook of a module that uses the
    bucket clears the handle.

Affects:
    Every release. What the patch does: a second start keeps the gather in flight, because it
    carries the same values; if upstream has marked that gather as outdated
    (`param_gather_dispatched` is False), the patch waits for it and dispatches a new one.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `start_param_sync`.

Remove when:
    `start_param_sync` may be called with a gather in flight. `upstream/start-param-sync-reentry`
    has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import gather

from ._case import Original, Patch, address, bench, target


def start(original: Original, self: Any, force_sync: bool = False) -> Any:
    """Start a bucket group's gather, unless a gather of the same values is in flight."""
    if not force_sync and self.param_gather_handle is not None:
        current = self.param_gather_dispatched
        if current and not gather.marked(self):
            return None
        gather.wait(self)
    return original(self, force_sync=force_sync)


def reproduce() -> None:
    """Call `start_param_sync()` twice, then run forward and backward of two microbatches.
    On stock Megatron the second call raises an `AssertionError`.
    """
    model = bench(overlap_param_gather=True)
    for chunk in model.chunks:
        chunk.start_param_sync()
        chunk.start_param_sync()
    model.forward_backward(2, data_seed=0)


PATCH = Patch(
    "start_param_sync() asserts where a gather is in flight, as after an aborted forward",
    target("group.start_param_sync", start),
    groups=("overlap", "abort"),
    fixed_by=((address("group.start_param_sync"), "if self.param_gather_dispatched:\n    return"),),
    stock_error=r"^AssertionError:$",
)
