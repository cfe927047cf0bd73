"""A parameter that requires no gradient gets none, so that the inner optimizer skips it."""

from upstream.edits import Repair, after, before, replace, substitute

OPTIMIZER = "megatron.core.optimizer.optimizer"
FLOAT16_COPY = f"{OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
DISTRIBUTED_COPY = f"{DISTRIBUTED}._copy_model_grads_to_main_grads"
UNSCALED = f"{DISTRIBUTED}._collect_main_grad_data_for_unscaling"
HYBRID = (
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    ":HybridDeviceOptimizer._set_sub_optimizer_grads"
)
FSDP = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
    ":ParamAndGradBuffer.update_main_grads"
)
COUNT = "self._count_step_of_skipped_params()"

REPAIR = Repair(
    edits=(
        substitute(
            FLOAT16_COPY,
            "if hasattr(model_param, 'main_grad'):",
            """if not model_param.requires_grad:
                    # Without a gradient the optimizer skips it.
                    main_param.grad = None
                elif hasattr(model_param, 'main_grad'):""",
        ),
        substitute(
            FLOAT16_COPY,
            "model_param.grad = model_param.main_grad",
            "model_param.grad = model_param.main_grad if model_param.requires_grad else None",
        ),
        substitute(
            f"{OPTIMIZER}:FP32Optimizer.prepare_grads",
            "param.grad = param.main_grad",
            "param.grad = param.main_grad if param.requires_grad else None",
        ),
        before(
            f"{OPTIMIZER}:MegatronOptimizer",
            "def offload_to_cpu(self): ",
            '''
            def _count_step_of_skipped_params(self):
                """Count a step for params without gradients, as one step is saved for all."""
                for param, state in self.optimizer.state.items():
                    if 'step' in state and getattr(param, 'decoupled_grad', param.grad) is None:
                        state['step'] += 1

            ''',
        ),
        before(
            f"{OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads",
            "self.optimizer.step()",
            COUNT,
        ),
        before(f"{OPTIMIZER}:FP32Optimizer.step_with_ready_grads", "self.optimizer.step()", COUNT),
        substitute(
            DISTRIBUTED_COPY,
            "shard_main_param.decoupled_grad = shard_model_grad",
            """shard_main_param.decoupled_grad = (
                            shard_model_grad if model_param.requires_grad else None
                        )""",
        ),
        substitute(
            DISTRIBUTED_COPY,
            "shard_main_param.grad = shard_model_grad.float()",
            """shard_main_param.grad = (
                            shard_model_grad.float() if model_param.requires_grad else None
                        )""",
        ),
        replace(
            UNSCALED,
            "param.decoupled_grad.data",
            """
            return [
                param.decoupled_grad.data
                for param in self.get_parameters()
                if param.decoupled_grad is not None
            ]
            """,
        ),
        replace(
            UNSCALED,
            "param.grad.data",
            "return [p.grad.data for p in self.get_parameters() if p.grad is not None]",
        ),
        substitute(
            FSDP,
            "optimizer_grad.numel() == 0",
            "optimizer_grad.numel() == 0 or not param.requires_grad",
        ),
        after(HYBRID, "fp32_param.requires_grad = False", "fp32_param.grad = None"),
        before(HYBRID, "if grad is None:\n    param.requires_grad = False", "param.grad = None"),
        replace(HYBRID, "param.grad = self.cpu_copy_map_grad[param]", ""),
        before(
            HYBRID,
            "self.cpu_copy_map_grad[param].data.copy_",
            "param.grad = self.cpu_copy_map_grad[param]",
        ),
    ),
    unit_tests=(
        "test_optimizer.py",
        "distributed/mfsdp_v1/test_mcore_fully_sharded_data_parallel.py",
    ),
    rereads=("offload-drops-gradients", "unscaled-twice"),
)
