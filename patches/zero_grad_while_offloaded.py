"""`zero_grad_buffer()` while the gradient buffers are offloaded writes to freed memory.

Symptom:
    A segmentation fault, on a GPU an illegal memory access, from `zero_grad_buffer()` between
    `offload_grad_buffers()` and `restore_grad_buffers()`: a loop that zeroes at its end or in an
    abort, or a checkpoint that zeroes, while generation uses the memory.

Cause:
    Offloading shrinks the storage to zero bytes and leaves the tensors as they were.

Affects:
    0.16.0 and later. What the patch does: it does not write to a buffer without memory. Restoring
    the buffer zeroes it; the rest of `zero_grad_buffer` runs as before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBuffer.reset`.

Remove when:
    `_ParamAndGradBuffer.reset` checks the storage. `upstream/zero-grad-while-offloaded` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, address, bench, target


def reset(original: Original, self: Any) -> None:
    """Wrap a gradient buffer's zeroing: if the memory of `grad_data` is offloaded, do not write to
    it, and zero only the buffer's other tensors, which some releases have.
    """
    if self.grad_data.untyped_storage().size() or not self.grad_data.numel():
        original(self)
        return
    offloaded = self.grad_data
    try:
        # In some releases upstream's body also zeroes other tensors.
        self.grad_data = offloaded.new_empty(0)
        original(self)
    finally:
        self.grad_data = offloaded


def reproduce() -> None:
    """Zero gradient buffers while they are offloaded, restore them, and train on.
    On stock Megatron the process dies with a segmentation fault.
    """
    model = bench()
    for seed in range(2):
        model.train_step(2, data_seed=seed)
        for chunk in model.chunks:
            chunk.offload_grad_buffers()
            chunk.zero_grad_buffer()
            chunk.restore_grad_buffers()


PATCH = Patch(
    "zero_grad_buffer() while the gradient buffers are offloaded is a segmentation fault",
    target("buffer.reset", reset),
    since="0.16",
    came_with=(address("ddp.offload_grad_buffers"), ""),
    groups=("offload",),
    fixed_by=((address("buffer.reset"), "self.grad_data.untyped_storage().size() > 0"),),
    stock_error=r"died with signal SIGSEGV|CUDA error: an illegal memory access",
)
