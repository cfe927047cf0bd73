"""Bridge's `load_checkpoint` returns with the `checkpoint.finetune` that it was called with."""

from upstream.edits import Repair, after, wrap

_LOAD = "megatron.bridge.training.checkpointing:load_checkpoint"

REPAIR = Repair(
    edits=(
        after(_LOAD, "load_dir = cfg.checkpoint.load", "finetune = cfg.checkpoint.finetune"),
        wrap(
            _LOAD,
            "return _load_checkpoint_from_path(",
            "try:",
            """
            finally:
                # A later load may resume, even if this one begins from other weights.
                cfg.checkpoint.finetune = finetune
            """,
        ),
    ),
    unit_tests=("training/test_checkpointing.py",),
)
