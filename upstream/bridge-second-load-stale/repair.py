"""Bridge reads a checkpoint's counters and configuration again in every load."""

from upstream.edits import Repair, after

REPAIR = Repair(
    edits=(
        after(
            "megatron.bridge.training.checkpointing:_load_checkpoint_from_path",
            "ckpt_format = cfg.checkpoint.ckpt_format",
            """

            # Training changes the cached counters, and a save overwrites the files.
            read_train_state.cache_clear()
            read_run_config.cache_clear()
            """,
        ),
    ),
    unit_tests=("training/test_checkpointing.py",),
)
