"""An optimizer remembers that it has unscaled its gradients, until a step or `zero_grad()`."""

from upstream.edits import Repair, after, before, first

MIXED = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer"
FLOAT16 = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
FORGET = "self.grads_unscaled = False"

REPAIR = Repair(
    edits=(
        after(f"{MIXED}.__init__", "self.grad_scaler = grad_scaler", FORGET),
        first(
            f"{MIXED}.prepare_grads",
            """
            # The gradients are unscaled in place, and so only once.
            if self.grads_unscaled:
                return False

            """,
        ),
        after(
            f"{MIXED}.prepare_grads",
            "self.grad_scaler.update(found_inf_flag)",
            "self.grads_unscaled = not found_inf_flag",
        ),
        before(f"{MIXED}.step_with_ready_grads", "return True", f"{FORGET}\n"),
        first(f"{FLOAT16}.zero_grad", FORGET),
        first(f"{DISTRIBUTED}.zero_grad", FORGET),
    ),
    unit_tests=("test_optimizer.py", "training/test_param_norm.py"),
    rereads=("frozen-parameters-move", "offload-drops-gradients"),
)
