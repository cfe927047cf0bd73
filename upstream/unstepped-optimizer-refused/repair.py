"""`state_dict()` gives torch's Adam the state of its first step, zeros, if there is none yet."""

from upstream.edits import Repair, first

REPAIR = Repair(
    edits=(
        first(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
            """
            if not HAVE_APEX_OR_TE and len(self.optimizer.state) == 0:
                # Torch's Adam allocates its state, which has the step, in its first step.
                for adam in getattr(self.optimizer, 'sub_optimizers', [self.optimizer]):
                    for param in itertools.chain(*(group['params'] for group in adam.param_groups)):
                        adam.state[param] = {
                            'step': torch.tensor(0.0),
                            **{key: torch.zeros_like(param) for key in self.optimizer_state_keys},
                        }
                if isinstance(self.optimizer, HybridDeviceOptimizer):
                    self.optimizer._sync_sub_optimizers_state_to_hdo()
            """,
        ),
    ),
    unit_tests=("test_optimizer.py", "dist_checkpointing/test_optimizer.py"),
)
