"""A gradient that an aborted backward left in `param.grad` is added to the next window's.

Symptom:
    After an exception or a keyboard interrupt in a backward pass a parameter's gradient in the next
    window contains that of the aborted window. No error.

Cause:
    Autograd accumulates into `param.grad`; after that DDP's hook adds it to the gradient buffer and
    sets it to None. An exception between the two leaves it set. `zero_grad_buffer()` zeroes the
    buffer only, and `zero_grad()` of the distributed optimizer reaches only those parameters of
    which this rank holds a shard.

Affects:
    Every release. What the patch does: `zero_grad_buffer()` sets `param.grad` of the parameters in
    the buffers to None, as DDP's hook does after each backward.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/distributed_data_parallel.py,
    `_make_backward_post_hook` and `zero_grad_buffer`.

Remove when:
    `zero_grad_buffer()` resets `param.grad`. `upstream/grad-left-by-aborted-backward` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, abort_in_backward, address, bench, expect_gradients, target


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: first set `param.grad` of the chunk's parameters to None."""
    for param in self.params_with_grad:
        if param.grad is not None:
            param.grad = None
    original(self)


def reproduce() -> None:
    """Interrupt a backward after autograd has set `param.grad`, then run a window.
    On stock Megatron the window's gradients also contain the gradient of the interrupted backward.
    """
    import torch

    model = bench(overlap_grad_reduce=False)
    model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    abort_in_backward(model, torch.Tensor.register_post_accumulate_grad_hook)
    expect_gradients(model, expected)


PATCH = Patch(
    "a gradient that an aborted backward left in param.grad adds to the next window's",
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    groups=("abort",),
    fixed_by=((address("group.reset"), "param.grad = None"),),
)
