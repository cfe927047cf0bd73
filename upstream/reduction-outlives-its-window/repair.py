"""A bucket group that starts over waits for the reduction that an aborted window left in flight."""

from upstream.edits import Repair, after

REPAIR = Repair(
    edits=(
        after(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.reset",
            "self.grad_reduce_finished = False",
            """
            # A window that raised has left its reduction in flight, which may have written into the
            # zeroed gradients.
            if self.grad_reduce_handle is not None:
                self.grad_reduce_handle.wait()
                self.grad_reduce_handle = None
                for bucket in self.buckets:
                    bucket.grad_data.zero_()
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    ranks=2,
    rereads=("deferred-embedding-reduced-early",),
    leaves="several distributed-optimizer instances, whose reductions have no handle",
)
