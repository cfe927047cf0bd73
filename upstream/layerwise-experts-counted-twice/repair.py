"""`shard_params()` shards experts over their replicas, also if the dense layers have none."""

from upstream.edits import Repair, last, substitute

SHARD = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.shard_params"

REPAIR = Repair(
    edits=(
        substitute(
            SHARD,
            "if dp_cp_size == 1:",
            "if dp_cp_size == 1 and get_pg_size(self.expt_dp) == 1:",
        ),
        last(
            SHARD,
            """
            if dp_cp_size == 1:
                # Only experts have replicas.
                self.dp_cp_params_list = None
            """,
        ),
    ),
    unit_tests=("test_layer_wise_optimizer.py",),
    ranks=2,
)
