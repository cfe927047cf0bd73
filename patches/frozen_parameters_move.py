"""A parameter that is frozen after the optimizer was built goes on moving.

Symptom:
    Adapters, a router or a head that a program freezes between two windows go on moving, by the
    optimizer's momentum and by weight decay, and their moments decay. No error.

Cause:
    A frozen parameter has no gradient, and torch's optimizers skip it. Megatron's optimizers still
    give it the gradient in DDP's buffer, which is zero, and Adam steps on zero. The optimizer on
    the host reuses the gradient of an earlier step if it gets none. In Megatron-FSDP the module
    holds a parameter's shard between two windows, and the complete parameter within a window:
    `requires_grad_(False)` reaches the shard, and the complete parameter still gets a gradient.

Affects:
    Every release, with fp32, fp16 and bf16, the distributed optimizer, `optimizer_cpu_offload` and
    Megatron-FSDP. What the patch does: the optimizer skips a parameter that requires no gradient,
    which keeps its bits and its moments until it is unfrozen. Its step count advances with that of
    the others, because Megatron saves one count for all. It adds zero to the gradient's norm. A
    step that was captured in a CUDA graph is replayed unchanged. If Megatron-FSDP has the complete
    parameter in the module (`overlap_param_gather`, "optim_grads_params"), its backward refuses a
    frozen one: "it is in a parameter group with requires_grad=True".

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/optimizer.py,
    `FP32Optimizer.prepare_grads`, `_copy_model_grads_to_main_grads`.

Remove when:
    these leave the gradient of a frozen parameter at None, and `HybridDeviceOptimizer` then skips
    it. `upstream/frozen-parameters-move` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target


def prepare_grads(original: Original, self: Any) -> Any:
    """Wrap `prepare_grads`: first zero the gradients of frozen shards of Megatron-FSDP.
    The gradient norm then does not count them.
    """
    if optimizers.in_fsdp(self):
        for shard in optimizers.frozen(self):
            for gradient in shard.grad, getattr(shard, "decoupled_grad", None):
                if gradient is not None:  # not None, because the norm finds its group by it
                    gradient.zero_()
    return original(self)


def step(original: Original, self: Any) -> bool:
    """Wrap an optimizer's update: skip parameters that are frozen, but count the step for them."""
    frozen = optimizers.frozen(self)
    optimizers.leave_out(self.optimizer, frozen)
    succeeded: bool = original(self)
    if frozen:
        optimizers.count_step(self.optimizer, frozen)
    return succeeded


def reproduce() -> None:
    """Freeze the output layer after two steps and take a third, with and without CPU offload.
    On stock Megatron the third step still moves the frozen weight.
    """
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    for overrides in {}, offload:
        model = bench(
            dtype="bf16", overlap_grad_reduce=False, optimizer_overrides={"lr": 0.1, **overrides}
        )
        for seed in range(2):
            model.train_step(1, data_seed=seed)
        head = model.chunks[0].module.module.output_layer.requires_grad_(False).weight
        weight_before = head.detach().clone()
        model.train_step(1, data_seed=2)
        if not head.equal(weight_before):
            raise Fault(
                f"a frozen weight has moved by {float((head - weight_before).abs().max()):.2g} "
                f"in a step{' on the host' if overrides else ''}"
            )


PATCH = Patch(
    "what is frozen after the optimizer was built goes on moving, by momentum and weight decay",
    target("mixed.prepare_grads", prepare_grads),
    target("mixed.step_with_ready_grads", step),
    target("fp32.step_with_ready_grads", step),
    fixed_by=(
        (address("distributed._copy_model_grads_to_main_grads"), "model_param.requires_grad"),
    ),
)
