"""`RerunDataIterator` returns copies of the stored microbatches to each rerun."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.core.rerun_state_machine:RerunDataIterator.__next__",
            "self.saved_microbatches[self.replay_pos]",
            "copy.copy(self.saved_microbatches[self.replay_pos])",
        ),
    ),
    unit_tests=("dist_checkpointing/test_rerun_state_machine_ckpt.py",),
)
