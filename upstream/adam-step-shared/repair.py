"""A load gives each parameter the saved step as its own, and updates the copies on the host."""

from upstream.edits import Repair, decorate, first, last, substitute

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
SET = f"{OPTIMIZER}._set_main_param_and_optimizer_states"
HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
SYNC = """
if isinstance(self.optimizer, HybridDeviceOptimizer):
    self.optimizer._sync_hdo_state_to_sub_optimizers()
"""

REPAIR = Repair(
    edits=(
        substitute(f"{OPTIMIZER}.load_state_dict", 's["step"] = step', 's["step"] = step.clone()'),
        first(
            SET,
            """
            # The step is restored from the param groups, see load_state_dict().
            tensors = {key: value for key, value in tensors.items() if key != "step"}
            """,
        ),
        substitute(
            SET, "for key in dst_tensors:", "for key in dst_tensors.keys() & tensors.keys():"
        ),
        # An fp32 main param is a view of a parameter.
        decorate(SET, "@torch.no_grad()"),
        last(f"{OPTIMIZER}.load_parameter_state_from_dp_reshardable", SYNC),
        last(f"{OPTIMIZER}.load_parameter_state_from_dp_zero", SYNC),
        last(
            f"{HYBRID}._sync_hdo_state_to_sub_optimizers",
            """
            for cpu_copy, param in self.cpu_copys_map_gpu_param.items():
                # Copies in fp32 of 16-bit params are updated above.
                if cpu_copy.dtype == param.dtype:
                    cpu_copy.data.copy_(param)
            """,
        ),
    ),
    unit_tests=(
        "test_optimizer.py",
        "test_optimizer_cpu_offloading.py",
        "dist_checkpointing/test_optimizer.py",
    ),
    also=("reshardable-load-wants-step", "offloaded-optimizer-loads-wrong"),
    rereads=("optimizer-states-of-others",),
)
