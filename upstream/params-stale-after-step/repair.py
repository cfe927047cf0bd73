"""A step of the distributed optimizer marks the gathered parameters as out of date."""

from upstream.edits import Repair, first

REPAIR = Repair(
    edits=(
        first(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
            """
            if self.ddp_config.overlap_param_gather and not self.ddp_config.use_megatron_fsdp:
                # A forward pass since finish_grad_sync() has gathered the params that now change.
                for model_chunk in self.model_chunks:
                    model_chunk.free_overlap_buffers()
                    model_chunk.reset_param_sync_dispatch_state()

            """,
        ),
    ),
    unit_tests=("test_optimizer.py",),
    ranks=2,
    rereads=("checkpoint-before-gather", "pending-gather-dropped", "state-dict-without-state"),
)
