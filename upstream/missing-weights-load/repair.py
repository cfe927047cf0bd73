"""A strict load accepts only missing or unexpected extra states, and names everything else."""

from upstream.edits import Repair, after, before, substitute

LOAD = "megatron.training.checkpointing:load_checkpoint.load_model_state_dict"
RETURN = ("self.module.load_state_dict(", "return self.module.load_state_dict(")

REPAIR = Repair(
    edits=(
        before(
            LOAD,
            "if strict:",
            """
            if not strict:
                raise
            """,
        ),
        after(
            LOAD,
            "print(f'load_return: {load_return}')",
            """
            for verb, keys in zip(('lacks', 'has unexpected'), load_return or ()):
                # Other keys than extra states are for --dist-ckpt-strictness to accept.
                keys = ', '.join(key for key in keys if not key.endswith('_extra_state'))
                if keys and args.dist_ckpt_strictness.startswith(('assume_ok', 'raise')):
                    raise RuntimeError(f'The checkpoint {verb} {keys}') from e
            """,
        ),
        substitute(
            "megatron.core.distributed.data_parallel_base:_BaseDataParallel.load_state_dict",
            *RETURN,
        ),
        substitute("megatron.core.transformer.module:Float16Module.load_state_dict", *RETURN),
    ),
    unit_tests=("test_checkpointing.py",),
)
