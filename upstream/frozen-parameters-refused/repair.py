"""A bucket group does not wait for gradients of frozen parameters, and gathers them as others."""

from upstream.edits import Repair, before, replace, substitute

FINISH = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

REPAIR = Repair(
    edits=(
        before(
            FINISH,
            "if self.is_first_batch:",
            """
            # Params that were frozen after the first batch have no gradients to wait for.
            unready = set()
            if self.grad_reduce_handle is None:
                unready = self.params - self.per_param_grad_ready_counts.keys()
            waits_for_frozen = unready and not any(param.requires_grad for param in unready)
            """,
        ),
        substitute(FINISH, "self.is_first_batch", "self.is_first_batch or waits_for_frozen"),
        replace(f"{DDP}._make_forward_pre_hook", "assert param.requires_grad", ""),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    ranks=2,
    rereads=(
        "deferred-embedding-reduced-early",
        "first-window-aborted",
        "layerwise-gather-erases-gradients",
    ),
)
