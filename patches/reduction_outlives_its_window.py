"""A gradient reduction in flight when a window ends early breaks the windows after it.

Symptom:
    After an exception in the backward of the last microbatch: `AssertionError: Should not have
    multiple communication calls outstanding at once` from every window after it, for ever. If only
    some bucket groups have reductions in flight, a late reduction writes into a gradient buffer
    that `zero_grad_buffer()` has already zeroed: wrong gradients, no error.

Cause:
    With overlap_grad_reduce a bucket group starts its reduction in the backward pass and
    `finish_grad_sync()` waits for it. `zero_grad_buffer()` zeroes the buffers and resets the counts
    of a bucket group, but neither waits for its handle nor drops it.

Affects:
    Every release. What the patch does: `zero_grad_buffer()` first waits for reductions in flight;
    after a complete window there are none. The wait ends only if all ranks of the group started the
    same reductions; after a failure on some ranks only, agree between ranks first.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `zero_grad_buffer`.

Remove when:
    `zero_grad_buffer()` or the reset of a bucket group waits for the handle.
    `upstream/reduction-outlives-its-window` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Original, Patch, a_body_has, abort_in_backward, bench, expect_gradients, target


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: first wait for the chunk's gradient reductions in flight."""
    for group in self.bucket_groups:
        ddp.drain(group)
    for group in self.expert_parallel_bucket_groups:
        ddp.drain(group)
    original(self)


def reproduce() -> None:
    """Interrupt the last backward of a window with reductions in flight, then run a window.
    On stock Megatron the second window asserts, or its gradients are wrong.
    """
    import torch

    model = bench()
    for _ in range(2):  # releases from 0.16 on reduce early from their second window on
        model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    abort_in_backward(model, torch.Tensor.register_hook)
    expect_gradients(model, expected)


PATCH = Patch(
    "after an abort in the last backward, old reductions break or spoil later windows",
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    groups=("overlap", "abort"),
    fixed_when=a_body_has("grad_reduce_handle.wait()"),
    stock_error=r"AssertionError: Should not have multiple communication calls outstanding at once",
    loudness="both",
)
