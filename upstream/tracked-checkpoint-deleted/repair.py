"""The clean-up keeps the non-persistent checkpoint that the tracker file names, and newer ones."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.training.checkpointing:cleanup_old_non_persistent_checkpoint",
            "rm_iter_ckpts = sorted_iter_ckpts[:-leave_ckpt_num]",
            """
            tracker = Path(get_checkpoint_tracker_filename(save_dir))
            if tracker.is_file():
                # After a roll back, the checkpoint that a restart would load is not the newest.
                iterations = [int(ckpt.name[len(iter_prefix) :]) for ckpt in sorted_iter_ckpts]
                needed = sum(it >= int(tracker.read_text()) for it in iterations)
                leave_ckpt_num = max(leave_ckpt_num, needed)
            """,
        ),
    ),
    unit_tests=("test_checkpointing.py",),
)
