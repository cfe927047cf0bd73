"""`reload_model_params()` updates main params and every copy that the hybrid optimizer steps."""

from upstream.edits import Repair, after, before, last, replace, substitute

COPY = (
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
    "._copy_model_params_to_main_params"
)

REPAIR = Repair(
    edits=(
        before(
            COPY,
            "if isinstance(self.optimizer, HybridDeviceOptimizer):",
            "hybrid = isinstance(self.optimizer, HybridDeviceOptimizer)",
        ),
        substitute(
            COPY,
            "if isinstance(self.optimizer, HybridDeviceOptimizer):",
            """if hybrid and (
            self.ddp_config.use_megatron_fsdp
            or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        ):
            # The hybrid optimizer's params are shards of the model.""",
        ),
        last(
            COPY,
            """
            if hybrid:
                self.optimizer.update_fp32_param_by_new_param()
            """,
        ),
        replace(
            "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
            ".update_fp32_param_by_new_param",
            "for param, fp32_param in",
            """
            # Inner params are fp32 copies, copies on the host, or the params themselves.
            for param, inner_param in self.param_to_inner_param.items():
                inner_param.data.copy_(param)
            """,
        ),
        after(
            "megatron.core.optimizer.optimizer",
            "from .clip_grads import",
            "from .cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer",
        ),
        replace(
            "megatron.core.optimizer.optimizer:FP32Optimizer.reload_model_params",
            "pass",
            """
            if isinstance(self.optimizer, HybridDeviceOptimizer):
                self.optimizer.update_fp32_param_by_new_param()
            """,
        ),
    ),
    unit_tests=("test_optimizer_cpu_offloading.py", "test_optimizer.py"),
)
