"""With the optimizer on the host, the next step undoes weights that were loaded.

Symptom:
    A run with `optimizer_cpu_offload` loads weights without optimizer state: a start from a
    pretrained model, `--no-load-optim`, an adapter. The first forward is right. The first step
    restores the weights from before the load, updated once. No error: a run that should fine-tune a
    model trains a random one.

Cause:
    The hybrid optimizer steps on copies: copies on the host of the offloaded fraction, and float32
    copies of 16-bit parameters. `reload_model_params()` updates only the latter, which exist with
    the precision-aware optimizer, and in 0.12 no copies. It never updates the float32 main
    parameters between the model and the copies, which all other configurations have. For an
    optimizer in float32 it updates nothing, because without offload there are no copies.

Affects:
    Every release, at any fraction, even 0. What the patch does: `reload_model_params()` also copies
    the model to the main parameters, as without offload, and these to all copies. Megatron's
    `load_checkpoint` calls it for 16-bit models; after your own load, call it yourself, or
    `ensure_main_params_synced`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/5071 (open);
    https://github.com/NovaSky-AI/SkyRL/pull/2149.

Remove when:
    `reload_model_params` updates all copies of a `HybridDeviceOptimizer`.
    `upstream/reload-misses-offloaded-copies` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target


def copy_to_main(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the copy of model to main parameters.
    With CPU offload, also update the copies on the host.
    """
    hybrid = self.optimizer
    # Megatron-FSDP has main parameters of its own.
    if not optimizers.is_hybrid(hybrid) or optimizers.in_fsdp(self):
        original(self, *args, **kwargs)
        return
    self.optimizer = None  # with the hybrid optimizer upstream returns before it copies
    try:
        original(self, *args, **kwargs)
    finally:
        self.optimizer = hybrid
    optimizers.renew_copies(hybrid)


def reload_fp32(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `reload_model_params`: also copy the model's parameters to the copies on the host."""
    original(self, *args, **kwargs)
    if optimizers.is_hybrid(self.optimizer):
        optimizers.renew_copies(self.optimizer)


def reproduce() -> None:
    """Write 5 into all weights, call `reload_model_params()`, and step with CPU offload.
    On stock Megatron the step restores the weights from before.
    """
    import torch

    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "lr": 0.01}
    model = bench(dtype="bf16", optimizer_overrides=offload)
    with torch.no_grad():
        for parameter in model.chunks[0].parameters():
            parameter.fill_(5.0)
    model.optimizer.reload_model_params()
    model.train_step(1, data_seed=0)
    least = float(model.parameters().min())
    if least < 4.9:
        raise Fault(f"a weight that was loaded as 5.0 is {least:.2f} after a step of 0.01")


PATCH = Patch(
    "with optimizer_cpu_offload the first step after a weights-only load undoes it",
    target("distributed._copy_model_params_to_main_params", copy_to_main),
    target("fp32.reload_model_params", reload_fp32),
    fixed_by=(
        (
            address(
                "core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.update_fp32_param_by_new_param"
            ),
            "inner_param.data.copy_(param)",
        ),
    ),
)
