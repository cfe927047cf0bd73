"""A checkpoint does not load into an optimizer on the host, or Adam goes on at another step.

Symptom:
    With `optimizer_cpu_offload` and without the precision-aware optimizer loading the optimizer
    ends in a bare `KeyError: tensor(…)`. With it the load goes through, and with the checkpoint
    format "dp_reshardable" Adam then counts from the steps of the process that loads, so from 1
    in a new one: moments of an old run, and the bias correction of a first step.

Cause:
    `_update_fp32_params_by_new_state` takes each parameter for one that has a float32 copy; main
    parameters in float32 have none. The step counter is part of the template that a checkpoint is
    read into, and "dp_reshardable" takes it from there, over what was read. It also loads after the
    hybrid optimizer has made its copies, and does not renew them; other formats do.

Affects:
    Every release. Not `adam-step-shared`, which is about an optimizer on the device. What the patch
    does: parameters without a float32 copy are left out; after a load each has a counter of its own
    at the saved step, and all copies and moments are what was loaded. In torch's Adam of a hybrid
    optimizer that never stepped `unstepped-optimizer-refused` fills the state.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/pull/1403.

Remove when:
    a checkpoint with `optimizer_cpu_offload` in each format continues to the bit.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, bench, target


def update_fp32(original: Original, self: Any) -> None:
    """Run upstream's loop over the parameters that have a float32 copy."""
    state = self.state
    self.state = {each: held for each, held in state.items() if each in self.param_to_fp32_param}
    try:
        original(self)
    finally:
        self.state = state


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Run upstream's load, then bring counters, moments and copies to what was loaded."""
    import torch

    original(self, state_dict)
    hybrid = self.optimizer
    if not optimizers.is_hybrid(hybrid) or "optimizer" not in state_dict:  # that of Megatron-FSDP
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
    """Load into optimizers with and without 16-bit parameters of their own; look at the counters.

    The template of a checkpoint is from before the last step, as it is in a process that resumes.
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
        counters = {float(s["step"]) for one in hybrid.sub_optimizers for s in one.state.values()}
        if counters != {2.0}:
            raise Fault(f"two steps were saved, and the counters loaded are {counters}")


def _parameter_state(part: Any) -> dict[str, Any]:
    """Return the optimizer's part of a checkpoint in the format of buckets, by its older name."""
    kind, name = "dp_reshardable", "dp_reshardable"
    if not hasattr(part, "get_parameter_state_dp_reshardable"):  # before 0.15
        kind, name = "fully_sharded_bucket_space", "fs_bucket_space"
    found = getattr(part, f"get_parameter_state_{name}")()
    for buffer in range(len(part.buffers)):
        for buckets in found[buffer].values():
            for each in (each for bucket in buckets for each in bucket):
                each["padding"] = False
    return {"param_state": found, "param_state_sharding_type": kind}


PATCH = Patch(
    "an optimizer_cpu_offload checkpoint does not load, or Adam's step restarts",
    target("distributed.load_state_dict", load_state_dict),
    target(
        "core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._update_fp32_params_by_new_state",
        update_fp32,
    ),
    stock_error="Fault: |KeyError: tensor",
)
