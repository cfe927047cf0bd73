"""`save()` removes the files that mark an older checkpoint as complete before it writes."""

from upstream.edits import Repair, after, first

SAVE = "megatron.core.dist_checkpointing.serialization:save"

REPAIR = Repair(
    edits=(
        first(SAVE, "stale_files = []"),
        after(
            SAVE,
            "checkpoint_dir_path = maybe_msc.Path(",
            """
            marks = (checkpoint_dir_path / name for name in ("metadata.json", ".metadata"))
            stale_files = [path for path in marks if path.is_file()]
            """,
        ),
        after(
            SAVE,
            "save_preprocess(",
            """
            # If this save is interrupted, the rest of an older checkpoint must not load.
            with raise_on_all_ranks():
                for path in stale_files:
                    path.unlink()
            """,
        ),
    ),
    unit_tests=("dist_checkpointing/test_serialization.py",),
    after=("failed-dist-save-hangs",),
    ranks=2,
)
