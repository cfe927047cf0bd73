"""`train()` resets the timer that an earlier call of it left running, and starts it again."""

from upstream.edits import Repair, after

REPAIR = Repair(
    edits=(
        after(
            "megatron.training.training:train",
            "if config.finalize_model_grads_func is None",
            """

            # An earlier call of train() leaves this timer running.
            timers('interval-time', log_level=0).reset()
            """,
        ),
    ),
    unit_tests=("test_training.py", "test_eval_batch_size.py"),
)
