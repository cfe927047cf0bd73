"""An optimizer with a grad scaler has the schedules scale the loss."""

from upstream.edits import Repair, after, substitute

_OPTIMIZER = "megatron.core.optimizer"

REPAIR = Repair(
    edits=(
        substitute(
            _OPTIMIZER,
            "import ConstantGradScaler, DynamicGradScaler",
            "import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler",
        ),
        after(
            f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups",
            "if config.fp16 or config.bf16 or config.use_distributed_optimizer",
            """

            if grad_scaler is not None:
                # The schedules have to scale the loss, because this optimizer unscales gradients.
                for model_config in map(get_model_config, model_chunks):
                    func = model_config.grad_scale_func
                    # An earlier optimizer's function is replaced; any other one stays.
                    if func is None or isinstance(
                        getattr(func, '__self__', None), MegatronGradScaler
                    ):
                        model_config.grad_scale_func = grad_scaler.scale_loss
            """,
        ),
        after(
            "megatron.core.optimizer.grad_scaler:MegatronGradScaler",
            "def inv_scale(",
            '''

            def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
                """Multiply a loss by the scale, e.g., as config.grad_scale_func."""
                return self.scale * loss
            ''',
        ),
    ),
    unit_tests=("optimizer/test_clip_grads.py", "pipeline_parallel/test_schedules.py"),
)
