"""`finish_grad_sync()` dispatches the reductions of gradients that `no_sync()` has held back."""

from upstream.edits import Repair, before

FINISH = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.finish_grad_sync"
)

REPAIR = Repair(
    edits=(
        before(
            FINISH,
            "for bucket_group in self.bucket_groups + self.expert_parallel_bucket_groups",
            """
            bucket_groups = self.bucket_groups + self.expert_parallel_bucket_groups
            if (
                self.ddp_config.overlap_grad_reduce
                and self.ddp_config.num_distributed_optimizer_instances == 1
                and not any(
                    bucket_group.is_first_batch
                    or bucket_group.per_param_grad_ready_counts
                    or bucket_group.grad_reduce_handle is not None
                    or bucket_group.grad_reduce_finished
                    for bucket_group in bucket_groups
                )
            ):
                # All backward passes were inside of no_sync(), so no hook has dispatched.
                for bucket_group in bucket_groups:
                    bucket_group.start_grad_sync(force_all_reduce=force_all_reduce)
            """,
        ),
    ),
    unit_tests=("distributed/test_distributed_data_parallel.py",),
    ranks=2,
    rereads=("finish-grad-sync-twice", "gradient-after-reduction", "second-window-not-reduced"),
    leaves="several distributed-optimizer instances, whose reductions have no handle",
)
