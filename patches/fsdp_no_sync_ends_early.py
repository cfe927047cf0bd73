"""`no_sync()` of Megatron-FSDP ends at the first exit of any entry, like that of DDP.

Symptom:
    Inside of `with chunk.no_sync():` gradients are reduced after a pipeline schedule has run in it.
    After a window that raised, a later window reduces before its last microbatch, when the
    exception is freed. With the strategies "no_shard" and "optim" an extra reduction makes the
    gradient wrong. No error.

Cause:
    The context manager is a generator that sets `is_last_microbatch` to False and then to True. It
    does not count entries, and the schedules leave it suspended when they raise.

Affects:
    megatron-core 0.16 on, `use_megatron_fsdp` with overlap_grad_reduce. What the patch does: the
    same as `no-sync-ends-early` for DDP.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py,
    `no_sync`.

Remove when:
    `no_sync` counts its entries and the schedules leave it in a `finally`.
    `upstream/fsdp-no-sync-ends-early` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.ddp import no_sync, zero_grad_buffer

from ._case import Fault, Patch, address, bench, target


def reproduce() -> None:
    """Run a schedule inside of Megatron-FSDP's `no_sync`; then exit an older context in a new one.
    The older `no_sync` was entered before the gradients were zeroed. On stock Megatron the schedule
    and the exit each turn reductions on again, although a `no_sync` is open.
    """
    model = bench(fsdp="optim")
    (chunk,) = model.chunks
    with chunk.no_sync():
        model.forward_backward(1, data_seed=0, zero_first=False)
        _expect_held(chunk, "after a schedule has run in it")
    stale = chunk.no_sync()
    stale.__enter__()
    chunk.zero_grad_buffer()
    with chunk.no_sync():
        stale.__exit__(None, None, None)
        _expect_held(chunk, "after the exit of an earlier window")


def _expect_held(chunk: Any, when: str) -> None:
    if chunk.module.is_last_microbatch:
        raise Fault(f"gradients are reduced inside of no_sync() {when}")


def control() -> object:
    """Run steps whose schedule enters `no_sync` itself, as a control; return parameters' bytes."""
    model = bench(fsdp="optim")
    (chunk,) = model.chunks
    bits = []
    for data_seed in range(3):
        with chunk.no_sync():
            chunk.zero_grad_buffer()
        model.train_step(2, data_seed=data_seed)
        bits.append(model.bits())
    return bits


PATCH = Patch(
    "no_sync() of Megatron-FSDP ends at an inner exit, or at one of a window that raised",
    target("fsdp.no_sync", no_sync),
    target("fsdp.zero_grad_buffer", zero_grad_buffer),
    since="0.16",
    groups=("overlap", "abort"),
    fixed_by=((address("fsdp.no_sync"), "self.no_sync_contexts.discard(context)"),),
    needs=("einops",),
)
