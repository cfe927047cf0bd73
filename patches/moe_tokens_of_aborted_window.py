"""Token counts of an aborted window are in the next window's expert bias and auxiliary loss.

Symptom:
    After an abort in an MoE model the next window's expert bias update, and with the auxiliary loss
    type `global_aux_loss` its router gradients too, contain the tokens of the aborted window. No
    error.

Cause:
    Routers count tokens per expert over the microbatches of a window, in `local_tokens_per_expert`
    and `global_tokens_per_expert`. `finalize_model_grads` resets them. A window that raises before
    that leaves them as they are.

Affects:
    Every release; `global_aux_loss` exists from 0.15 on. What the patch does: `zero_grad_buffer()`
    resets them along with the gradients of the same tokens. After a complete window they are
    already zero. Windows that add up gradients without zeroing also add up tokens, as before.
    Values that routers record for logging (auxiliary losses, multi-token prediction) stay, because
    a caller may log them after zeroing gradients: `abort_window` drops them.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/finalize_model_grads.py,
    `reset_model_temporary_tensors`.

Remove when:
    the counts are reset at the start of a window. `upstream/moe-tokens-of-aborted-window` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.moe import forget_tokens

from ._case import EXPERT_BIAS, Fault, Original, Patch, address, bench, interrupt_window, target


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: first zero the token counts of the chunk's routers."""
    # A dense model need not walk over its modules.
    if getattr(self.config, "num_moe_experts", None):
        forget_tokens(self)
    original(self)


def reproduce() -> None:
    """Interrupt a window in its second microbatch, then zero the gradients for the next.
    On stock Megatron the routers still count the tokens of the interrupted window.
    """
    model = bench(experts=4, overlap_grad_reduce=False, config_overrides=EXPERT_BIAS)
    interrupt_window(model, at=1)
    (chunk,) = model.chunks
    chunk.zero_grad_buffer()
    counts = [
        module.local_tokens_per_expert.sum()
        for module in chunk.modules()
        if getattr(module, "local_tokens_per_expert", None) is not None
    ]
    if any(counts):
        raise Fault(f"{int(sum(counts))} tokens of the aborted window are still counted")


PATCH = Patch(
    "token counts of an aborted window go into the next expert bias and auxiliary loss",
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    groups=("abort", "aux-loss"),
    fixed_by=(
        (address("ddp.zero_grad_buffer"), "reset_model_temporary_tensors(self.config, [self])"),
    ),
)
