"""A checkpoint does not load into an optimizer on the host, or Adam continues at a wrong step.

Symptom:
    With `optimizer_cpu_offload` and without the precision-aware optimizer, loading the optimizer
    ends in a bare `KeyError: tensor(…)`. With the precision-aware optimizer the load succeeds, but
    with the checkpoint format "dp_reshardable" Adam then counts from the steps of the loading
    process, so from 1 in a new process: it has the moments of a long run, and the bias correction
    of a first step.

Cause:
    `_update_fp32_params_by_new_state` assumes that each parameter has a float32 copy; main
    parameters in float32 have none. The step counter is part of the template that a checkpoint is
    read into, and "dp_reshardable" overwrites the loaded counter with that of the template. It also
    loads after the hybrid optimizer has made its copies, and does not update them; other formats
    do.

Affects:
    Every release. Not `adam-step-shared`, which is about an optimizer on the device. What the patch
    does: it skips parameters without a float32 copy; after a load each parameter has its own
    counter, at the saved step, and all copies and moments have the loaded values. For the torch
    Adam of a hybrid optimizer that never stepped, `unstepped-optimizer-refused` fills the state.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/pull/1403.

Remove when:
    after a load in any format, a run with `optimizer_cpu_offload` continues with the same bits.
    `upstream/adam-step-shared` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target


def update_fp32(original: Original, self: Any) -> None:
    """Wrap a load's update of float32 copies: skip parameters that have no such copy."""
    state = self.state
    self.state = {param: s for param, s in state.items() if param in self.param_to_fp32_param}
    try:
        original(self)
    finally:
        self.state = state


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Run upstream's load; then give a CPU-offloaded optimizer the loaded step count.
    Also copy the model's parameters into the optimizer's host copies of the same precision.
    """
    import torch

    original(self, state_dict)
    hybrid = self.optimizer
    if not optimizers.is_hybrid(hybrid) or "optimizer" not in state_dict:  # Megatron-FSDP has none
        return
    groups = state_dict["optimizer"]["param_groups"]
    steps = {float(group["step"]) for group in groups if group.get("step") is not None}
    for state in hybrid.state.values():
        for saved in steps:
            state["step"] = torch.full((), saved, dtype=torch.float32, device="cpu")
    hybrid._sync_hdo_state_to_sub_optimizers()
    with torch.no_grad():
        optimizers.renew_copies(hybrid, widened=False)


def reproduce() -> None:
    """Save and load a CPU-offloaded optimizer, with and without the precision-aware option.
    On stock Megatron one of the two loads raises, and the other continues at a wrong step.

    The template for the load is from before the last step, as in a process that resumes.
    """
    import copy

    for precise in (True, False):
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "use_precision_aware_optimizer": precise,
        }
        model = bench(dtype="bf16", optimizer_overrides=offload)
        (part,) = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
        model.train_step(1, data_seed=0)
        template = copy.deepcopy(_parameter_state(part))
        model.train_step(1, data_seed=0)
        part.load_state_dict({**part.state_dict(), **template})
        hybrid = part.optimizer
        states = [state for part in hybrid.sub_optimizers for state in part.state.values()]
        counters = {float(state["step"]) for state in states}
        if counters != {2.0}:
            raise Fault(f"two steps were saved, and the counters loaded are {counters}")


def _parameter_state(part: Any) -> dict[str, Any]:
    """Return an optimizer's state in the `dp_reshardable` checkpoint format, on any release."""
    kind, name = "dp_reshardable", "dp_reshardable"
    if not hasattr(part, "get_parameter_state_dp_reshardable"):  # before 0.15
        kind, name = "fully_sharded_bucket_space", "fs_bucket_space"
    state = getattr(part, f"get_parameter_state_{name}")()
    for buffer in range(len(part.buffers)):
        for buckets in state[buffer].values():
            for entry in (entry for bucket in buckets for entry in bucket):
                entry["padding"] = False
    return {"param_state": state, "param_state_sharding_type": kind}


PATCH = Patch(
    "an optimizer_cpu_offload checkpoint does not load, or Adam's step restarts",
    target("distributed.load_state_dict", load_state_dict),
    target(
        "core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._update_fp32_params_by_new_state",
        update_fp32,
    ),
    stock_error="Fault: |KeyError: tensor",
    loudness="both",
    fixed_by=(
        (
            address("distributed.load_parameter_state_from_dp_reshardable"),
            "self.optimizer._sync_hdo_state_to_sub_optimizers()",
        ),
    ),
)
