"""After an interrupted backward under Megatron-FSDP, all later gradients are wrong.

Symptom:
    After an exception or a keyboard interrupt in a backward pass every later window of the process
    has wrong gradients, if gradients are sharded ("optim_grads", "optim_grads_params"). No error.

Cause:
    A hook before the backward of the root module queues a function that reduces the remaining
    gradients at its end, and sets `_root_pre_backward_hook_issued`; that function clears the flag.
    If the backward raises, the function never runs, and later backward passes no longer queue it:
    gradients of the embedding, the output layer and the last norm pile up in `param.grad`.
    Gradients that the interrupted backward had made ready also count as ready in the next one.

Affects:
    megatron-core 0.15 on, `use_megatron_fsdp`. The versions of 0.14 and the custom FSDP before it
    have the same flag, and are not patched: they do not run with today's torch. What the patch
    does: if `zero_grad_buffer()` finds the flag set, which a complete backward clears, or
    reductions without a wait, it waits for them and drops the state of the interrupted backward.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py,
    `_root_pre_backward`, `_root_post_backward`.

Remove when:
    `zero_grad_buffer()` resets the flag and the pipeline's state. `upstream/fsdp-backward-aborted`
    has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import fsdp

from ._case import Original, Patch, abort_in_backward, address, bench, expect_gradients, target


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `MegatronFSDP.zero_grad_buffer`: first reset the state of an interrupted backward."""
    if fsdp.was_interrupted(self):
        fsdp.start_over(self)
    original(self)


def reproduce() -> None:
    """Interrupt a backward under Megatron-FSDP half-way, then run two windows.
    On stock Megatron the gradients of the two windows are wrong, or the windows assert.
    """
    model = bench(fsdp="optim_grads_params")
    model.forward_backward(1, data_seed=0)
    expected = model.gradients()
    raw = model.chunks[0].module.raw_param
    # The first layer's gradients come last, except for the embedding's.
    in_the_middle = next(raw[name] for name in raw if "layers.0" in name)
    abort_in_backward(model, lambda _, fail: in_the_middle.register_post_accumulate_grad_hook(fail))
    for _ in range(2):
        expect_gradients(model, expected)


PATCH = Patch(
    "once a backward under Megatron-FSDP was interrupted, all later gradients are wrong",
    target("fsdp.zero_grad_buffer", zero_grad_buffer),
    since="0.15",
    groups=("abort",),
    fixed_by=((address("fsdp.zero_grad_buffer"), "self.grad_reduce_pipeline.reset()"),),
    needs=("einops",),
    stock_error=r"Fault: |AssertionError: Found \d+ out of \d+ parameters that are ready",
    loudness="both",
)
