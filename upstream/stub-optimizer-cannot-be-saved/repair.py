"""`ChainedOptimizer` leaves out its stubs, which have no state, when it saves and loads."""

from upstream.edits import Repair, before, replace, wrap

CHAIN = "megatron.core.optimizer.optimizer:ChainedOptimizer"
STUB = "getattr(optimizer, 'is_stub_optimizer', False)"
SYNCHRONIZE = '''
def _synchronize_steps(self):
    """
    Give all non-empty param groups the same step, and return it.
    TE FusedAdam does not count steps for empty param groups, so the groups are aligned
    before saving and after loading. Stub optimizers have no groups.
    """
    groups = [group for group in self.param_groups if group['params'] and 'step' in group]
    steps = list(set(group['step'] for group in groups))
    assert len(steps) <= 1, f"steps: {steps}"
    step = steps[0] if steps else None
    for group in groups:
        group['step'] = step

    return step
'''

REPAIR = Repair(
    edits=(
        replace(
            f"{CHAIN}.state_dict",
            "return [optimizer.state_dict()",
            f"""
            return [
                {{}} if {STUB} else optimizer.state_dict()
                for optimizer in self.chained_optimizers
            ]
            """,
        ),
        before(
            f"{CHAIN}.sharded_state_dict",
            "optim_state_dict = optimizer.sharded_state_dict(",
            f"""
            if {STUB}:
                continue
            """,
        ),
        before(
            f"{CHAIN}.load_state_dict",
            "if len(self.chained_optimizers) != len(state_dict):",
            f"""
            if isinstance(state_dict, dict):
                # Stubs have no entry in a sharded state dict.
                for idx, optimizer in enumerate(self.chained_optimizers):
                    if {STUB}:
                        state_dict = {{**state_dict, idx: {{}}}}
            """,
        ),
        wrap(
            f"{CHAIN}.load_state_dict",
            "optimizer.load_state_dict(state)",
            f"if not {STUB}:",
        ),
        replace(
            CHAIN,
            "def _synchronize_steps(self):",
            SYNCHRONIZE,
        ),
    ),
    unit_tests=("test_optimizer.py", "dist_checkpointing/test_optimizer.py"),
    after=("adam-step-shared",),
)
