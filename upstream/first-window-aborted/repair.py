"""A bucket group learns its golden counts from a window that was finished, and complete."""

from upstream.edits import Repair, before, replace, substitute

RESET = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.reset"
TESTS = "tests.unit_tests.distributed"
FINISHED = """
    # The window counts as finished, although no collective runs.
    bucket_group.grad_reduce_finished = True
"""

REPAIR = Repair(
    edits=(
        replace(RESET, "assert len(self.per_param_grad_ready_counts)", ""),
        substitute(
            RESET,
            "self.is_first_batch and len(self.per_param_grad_ready_counts) > 0",
            """(
            self.is_first_batch
            # An aborted window has counted too little, and so has one with unused params.
            and self.grad_reduce_finished
            and len(self.per_param_grad_ready_counts) == len(self.params)
        )""",
        ),
        before(f"{TESTS}.test_param_and_grad_buffer:test_grad_sync", "reset()", FINISHED),
        before(f"{TESTS}.test_grad_sync_with_expert_parallel:test_grad_sync", "reset()", FINISHED),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_grad_sync_with_expert_parallel.py",
    ),
    ranks=2,
    rereads=("deferred-embedding-reduced-early",),
)
