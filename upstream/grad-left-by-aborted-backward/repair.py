"""A bucket group that starts over drops what an aborted backward has left in `param.grad`."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.reset",
            "self.grad_reduce_finished = False",
            """
            if not self.grad_reduce_finished:
                # A backward pass that raised may have left gradients that are not in main_grad yet.
                for param in self.params:
                    param.grad = None
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    rereads=("deferred-embedding-reduced-early",),
)
