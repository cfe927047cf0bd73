"""Bridge's adapter of all experts drifts apart between expert-parallel ranks, silently.

Symptom:
    With `gradient_accumulation_fusion`, the default of most of Bridge's recipes, the adapter that
    grouped experts share has different gradients on each expert-parallel rank, and different
    weights after the first step. An export saves the weights of one rank. No error.

Cause:
    DDP sums an expert's gradient over expert-data-parallel ranks only, so Bridge sums the shared
    adapter's over expert-parallel ranks in a hook of its weight (`_allreduce_shared_expert_grad`).
    With the fused kernel Megatron adds the gradient to `main_grad` itself, and autograd and the
    hook get a dummy (`LinearWithGradAccumulationAndAsyncCommunication.backward`).

Affects:
    0.5 on, up to main of August 2026. What the patch does: the two small layers with such a hook
    compute their gradients without the fused kernel, so that the hook sums the gradients that DDP
    then adds to `main_grad`. All other layers keep the kernel. Pull request 6009 sums over the
    ranks once a step instead.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6009

Remove when:
    Bridge sums `main_grad`, and has no such hook.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, no_body_has, target

from . import _peft


def register(original: Original, self: Any) -> None:
    """Register hooks that sum a shared adapter's gradients, and turn off fused accumulation.
    With fused accumulation, weight gradients would not pass through the hooks.
    """
    original(self)
    _peft.unfuse(self.linear_in, self.linear_out)


def reproduce() -> None:
    """Check that shared adapters' gradients are equal on two expert-parallel ranks.
    Gradient accumulation is fused. Without the patch the gradients differ.
    """
    bench = _peft.build("LoRA", {"ep": 2, "experts": 4}, grouped=True, fused=True)
    bench.forward_backward(2, data_seed=0)
    _peft.expect_replicas(bench.chunks)


PATCH = Patch(
    "Bridge's shared expert adapters drift apart between expert-parallel ranks, silently",
    target(
        "peft.utils:ParallelLinearAdapter._register_shared_expert_grad_sync_hooks",
        register,
        "weight.register_hook(self._allreduce_shared_expert_grad)",
    ),
    since="0.5",
    fixed_when=no_body_has("weight.register_hook(self._allreduce_shared_expert_grad)"),
)
