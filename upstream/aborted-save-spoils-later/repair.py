"""`AsyncCallsQueue.close(abort=True)` also forgets the aborted calls and their results."""

from upstream.edits import Repair, after

REPAIR = Repair(
    edits=(
        after(
            "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.close",
            "AsyncCallsQueue._persistent_caller = None",
            """
            if abort:
                # These calls will not be finalized, and a later one must not take their results.
                from . import filesystem_async

                self.async_calls.clear()
                filesystem_async._results_queue = None
            """,
        ),
    ),
    unit_tests=("dist_checkpointing/test_async_save.py",),
)
