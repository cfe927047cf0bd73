"""`finish_grad_sync()` raises if a gradient came after its bucket's reduction had started."""

from upstream.edits import Repair, after, before

GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

REPAIR = Repair(
    edits=(
        after(f"{GROUP}.__init__", "self.grad_reduce_handle = None", "self.late_grads = False"),
        after(f"{GROUP}.reset", "self.is_last_microbatch = True", "self.late_grads = False"),
        before(
            f"{GROUP}.register_grad_ready",
            "if self.is_last_microbatch",
            """
            if self.grad_reduce_handle is not None:
                self.late_grads = True
            """,
        ),
        after(
            f"{GROUP}.finish_grad_sync",
            "self.grad_reduce_handle = None",
            """
            if self.late_grads:
                raise RuntimeError(
                    "Gradients came after the reduction of their bucket had started, and would "
                    "stay local. Has the number of microbatches changed without no_sync(), or was "
                    "the last microbatch inside of it?"
                )
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    ranks=2,
    rereads=(
        "deferred-embedding-reduced-early",
        "first-window-aborted",
        "frozen-parameters-refused",
        "layerwise-gather-erases-gradients",
    ),
    leaves="several distributed-optimizer instances, whose reductions have no handle",
)
