"""A step of the layer-wise optimizer marks the gathered parameters as out of date."""

from upstream.edits import Repair, first

REPAIR = Repair(
    edits=(
        first(
            "megatron.core.optimizer.layer_wise_optimizer"
            ":LayerWiseDistributedOptimizer.step_with_ready_grads",
            """
            if self.overlap_param_gather:
                # A forward pass since finish_grad_sync() has gathered the params that now change.
                for model_chunk in self.model_chunks:
                    model_chunk.free_overlap_buffers()
                    model_chunk.reset_param_sync_dispatch_state()

            """,
        ),
    ),
    unit_tests=("test_layer_wise_optimizer.py",),
    ranks=2,
)
