"""`DistributedOptimizer` numbers the parameters of a group in the order in which it steps them."""

from upstream.edits import Repair, before, decorate

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

REPAIR = Repair(
    edits=(
        before(
            f"{OPTIMIZER}.__init__",
            "if isinstance(self.optimizer, HybridDeviceOptimizer):",
            """
            # The optimizer's groups have fp32 params before fp16/bf16 ones, so renumber them.
            for group_index, params in enumerate(
                zip(self.model_fp32_groups, self.model_float16_groups)
            ):
                for group_order, param in enumerate(itertools.chain(*params)):
                    self.model_param_group_index_map[param] = (group_index, group_order)
            """,
        ),
        # These two write into views of fp32 parameters, too.
        decorate(f"{OPTIMIZER}.load_parameter_state_from_dp_reshardable", "@torch.no_grad()"),
        decorate(f"{OPTIMIZER}.load_parameter_state_from_dp_zero", "@torch.no_grad()"),
    ),
    unit_tests=("test_optimizer.py", "dist_checkpointing/test_optimizer.py"),
    ranks=2,
)
