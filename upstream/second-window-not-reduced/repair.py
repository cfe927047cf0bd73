"""A second window without zeroing is reduced again if that is exact; if not, it raises."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.distributed.param_and_grad_buffer"
            ":_ParamAndGradBucketGroup.register_grad_ready",
            "if param not in self.per_param_grad_ready_counts",
            """
            if self.grad_reduce_finished and param in self.per_param_grad_ready_counts:
                # A window without reset() adds to reduced grads. Only an average over all ranks
                # keeps these as they are if they are reduced again.
                sharded = self.ddp_config.use_distributed_optimizer
                ranks = (
                    self.intra_distributed_optimizer_instance_group
                    if sharded
                    else self.data_parallel_group
                ).size()
                exact = 1.0 if self.ddp_config.average_in_collective else 1.0 / ranks
                if (sharded and ranks > 1) or (
                    self.param_to_bucket[param].gradient_scaling_factor != exact
                ):
                    raise RuntimeError(
                        "Gradients were added to reduced ones, and cannot be reduced again. "
                        "Call zero_grad_buffer() before each window."
                    )
                self.grad_reduce_finished = False
                self.per_param_grad_ready_counts = {}
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    ranks=2,
    leaves="sums, and reductions without overlap, are reduced again silently",
)
