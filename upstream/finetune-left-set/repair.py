"""`load_checkpoint()` returns with the `args.finetune` that it was called with."""

from upstream.edits import Repair, after, before

LOAD = "megatron.training.checkpointing:load_checkpoint"
RESTORE = "args.finetune = finetune"

REPAIR = Repair(
    edits=(
        after(
            LOAD,
            "load_dir = getattr(args, load_arg)",
            """
            # A later load may resume, even if this one begins from other weights.
            finetune = args.finetune
            """,
        ),
        before(LOAD, "return 0, 0", RESTORE),
        before(LOAD, "return iteration, num_floating_point_operations_so_far", RESTORE),
    ),
    unit_tests=("test_checkpointing.py",),
    after=("adam-step-shared",),
)
