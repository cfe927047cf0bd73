"""Without overlap, `finish_grad_sync()` leaves gradients alone that it has already reduced."""

from upstream.edits import Repair, after, before

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

REPAIR = Repair(
    edits=(
        before(
            f"{DDP}.finish_grad_sync",
            "bucket_group.finish_grad_sync",
            """
            if bucket_group.grad_reduce_finished and not self.ddp_config.overlap_grad_reduce:
                continue
            """,
        ),
        after(
            f"{DDP}.finish_grad_sync",
            "bucket_group.finish_grad_sync",
            "bucket_group.grad_reduce_finished = True",
        ),
        after(
            f"{DDP}._make_backward_post_hook",
            "param.grad = None",
            """
            if not self.ddp_config.overlap_grad_reduce:
                # This gradient has to be reduced, too.
                self.param_to_bucket_group[param].grad_reduce_finished = False
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    ranks=2,
    rereads=("deferred-reduction-refused", "gradient-after-reduction", "second-window-not-reduced"),
)
