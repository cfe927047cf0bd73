"""`no_sync()` ends at the first exit of any entry: an inner one, or one of an aborted window.

Symptom:
    Inside of `with ddp.no_sync():` gradients are reduced after a pipeline schedule has run in it.
    And after a window that raised, a later window reduces before its last microbatch, when the
    exception is freed: wrong gradients without an error from 0.16 on, `AssertionError: Cannot set
    grad twice` before.

Cause:
    The context manager is a generator that turns one flag off and on again. It does not count
    entries. The schedules enter it without `with`. If they raise, the traceback keeps the suspended
    generator; when that is closed, it turns the flag on, even in the middle of a later window.

Affects:
    Every release, with overlap_grad_reduce. What the patch does: `no_sync` counts its entries per
    chunk, and the last exit turns synchronisation on. `zero_grad_buffer`, which always turned
    synchronisation on, starts a new count: exits of earlier entries do not end a later entry. So
    call `zero_grad_buffer` before you enter `no_sync`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `no_sync`.

Remove when:
    `no_sync` counts its entries and the schedules leave it in a `finally`.
    `upstream/no-sync-ends-early` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.ddp import bucket_groups, no_sync, zero_grad_buffer

from ._case import Fault, Patch, address, bench, target


def reproduce() -> None:
    """Exit an inner `no_sync` of DDP; then exit an older context inside of a new one.
    The older `no_sync` was entered before the gradients were zeroed. On stock Megatron each of the
    two exits turns reductions on again, although a `no_sync` is open.
    """
    model = bench(distributed_optimizer=False)
    (chunk,) = model.chunks
    with chunk.no_sync():
        with chunk.no_sync():
            pass
        _expect_held(chunk, "after an inner no_sync()")
    stale = chunk.no_sync()
    stale.__enter__()
    chunk.zero_grad_buffer()
    with chunk.no_sync():
        stale.__exit__(None, None, None)
        _expect_held(chunk, "after the exit of an earlier window")


def _expect_held(chunk: Any, when: str) -> None:
    if any(group.is_last_microbatch for group in bucket_groups(chunk)):
        raise Fault(f"gradients are reduced inside of no_sync() {when}")


def control() -> object:
    """Use `no_sync` as a decorator, leave it by an exception, and create one that is never entered.
    This is a control. Return the parameters' bytes after each step.
    """
    from . import _controls

    model = _controls.build(overlap=True, distributed=True, wired=False)
    (chunk,) = model.chunks
    decorated = chunk.no_sync()(model.forward_backward)
    bits = []
    for data_seed in range(3):
        chunk.zero_grad_buffer()
        chunk.no_sync()
        decorated(2, data_seed=data_seed, zero_first=False)
        decorated(data_seed + 1, data_seed=data_seed, zero_first=False)
        try:
            with chunk.no_sync():
                raise KeyError
        except KeyError:
            pass
        model.forward_backward(1, data_seed=data_seed, zero_first=False)
        chunk.finish_grad_sync()
        model.step()
        bits.append(model.bits())
    return bits


PATCH = Patch(
    "no_sync() ends at an inner exit, or at one of a window that raised: reduced too early",
    target("ddp.no_sync", no_sync),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    groups=("overlap", "abort"),
    fixed_by=((address("ddp.no_sync"), "bucket_group.no_sync_contexts.discard(context)"),),
    loudness="both",
)
