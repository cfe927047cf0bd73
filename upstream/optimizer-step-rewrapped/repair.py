"""`train()` passes its CUDA-graph wrapper to `train_step()` and leaves `optimizer.step` alone."""

from upstream.edits import Repair, after, replace, substitute

_TRAIN = "megatron.training.training:train"
_STEP = "megatron.training.training:train_step"

REPAIR = Repair(
    edits=(
        after(
            _TRAIN, "if args.moe_expert_rank_capacity_factor is not None", "optimizer_step = None"
        ),
        substitute(
            _TRAIN,
            "optimizer.step = OptimizerCudaGraphWrapper(",
            "optimizer_step = OptimizerCudaGraphWrapper(",
        ),
        substitute(
            _TRAIN,
            "forward_backward_func, iteration=iteration,",
            "forward_backward_func, iteration=iteration, optimizer_step=optimizer_step,",
        ),
        replace(_TRAIN, "del optimizer.step", "optimizer_step = None"),
        substitute(
            _STEP,
            "Optional[P2PCommunicator] = None)",
            "Optional[P2PCommunicator] = None, optimizer_step=None)",
        ),
        substitute(_STEP, "optimizer.step()", "(optimizer_step or optimizer.step)()"),
    ),
    unit_tests=("test_training.py", "training/test_train_step_schedule_plumbing.py"),
)
