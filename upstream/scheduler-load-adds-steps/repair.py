"""A load sets the scheduler to the saved step, and then sets rates from the loaded settings."""

from upstream.edits import Repair, last, replace

LOAD = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict"

REPAIR = Repair(
    edits=(
        replace(LOAD, "self.step(increment=num_steps)", "self.num_steps = num_steps"),
        last(
            LOAD,
            """
            # Set lr and weight decay of the param groups, now that all settings are restored.
            self.step(increment=0)
            """,
        ),
    ),
    unit_tests=("test_optimizer_param_scheduler.py",),
)
