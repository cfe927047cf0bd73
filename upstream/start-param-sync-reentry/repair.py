"""`start_param_sync()` keeps a gather in flight, and waits for one whose values are outdated."""

from upstream.edits import Repair, replace

START = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync"

REPAIR = Repair(
    edits=(
        replace(
            START,
            "assert self.param_gather_handle is None",
            """
            if self.param_gather_handle is not None:
                if self.param_gather_dispatched:
                    return
                # No forward has used these parameters since the all-gather before the last step.
                self.param_gather_handle.wait()
                self.param_gather_handle = None
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_param_readiness.py",
    ),
    ranks=2,
    rereads=(
        "checkpoint-before-gather",
        "layerwise-gather-erases-gradients",
        "layerwise-params-stale-after-step",
        "params-stale-after-step",
        "pending-gather-dropped",
    ),
)
