"""Offloading the optimizer to the host and back disconnects its parameters from the model's.

Symptom:
    After `optimizer.offload_to_cpu()` and `optimizer.restore_from_cpu()` with the precision-aware
    optimizer, steps report success and a gradient norm, but the model's parameters do not change.
    With other settings the next step undoes fp32 parameters that are loaded into the model
    afterwards, unless `reload_model_params()` is called.

Cause:
    Shards of fp32 parameters, and all shards under the precision-aware optimizer, are views of the
    model's parameter buffer. Both methods assign `p.data`, which breaks each view; the buffer
    itself stays on the device. The precision-aware optimizer relies on the views; the other one
    copies the shards to the model after its update.

Affects:
    0.16.0 and later; in 0.15 the methods raise a NameError. The reproduction checks the views of
    fp32 parameters; the precision-aware optimizer, which needs Transformer Engine, was never run.
    The patch is therefore off by default; name it in `only=` to use it. What it does: views of a
    model's parameter buffer stay where they are, which costs no memory, because the buffer also
    stays. All other tensors are moved as before.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/optimizer.py,
    `MegatronOptimizer.offload_to_cpu`.

Remove when:
    the methods move only tensors that the optimizer owns, or restore the views.
    `upstream/optimizer-offload-breaks-views` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def offload(original: Original, self: Any) -> None:
    """Wrap the optimizer's `offload_to_cpu`: keep parameters that are views of DDP's buffers."""
    buffers = {
        buffer.param_data.untyped_storage().data_ptr()
        for buffer in getattr(self, "buffers", ())
        if buffer.param_data is not None
    }
    views = [
        (param, param.data)
        for group in (self.optimizer.param_groups if buffers else ())
        for param in group["params"]
        if param.untyped_storage().data_ptr() in buffers
    ]
    original(self)
    for param, view in views:
        param.data = view


def reproduce() -> None:
    """Offload the optimizer to the host and restore it, and check that parameters are still views.
    On stock Megatron the optimizer's parameters are copies, so that steps do not reach the model.
    """
    model = bench()
    model.optimizer.offload_to_cpu()
    model.optimizer.restore_from_cpu()
    (optimizer,) = model.optimizer.chained_optimizers
    (buffer,) = optimizer.buffers
    buffer.param_data.fill_(7.0)
    if any((p != 7.0).any() for p in optimizer.get_parameters()):
        raise Fault("the optimizer's fp32 parameters are no longer views of the model's")


PATCH = Patch(
    "after optimizer.offload_to_cpu() and back its parameters are copies of the model's",
    target("any.offload_to_cpu", offload),
    since="0.16",
    fixed_by=((address("any.offload_to_cpu"), "buffer_ptrs"),),
    default=False,
)
