"""Zeroing the gradients of an MoE model also drops the token counts of an aborted window."""

from upstream.edits import Repair, last

REPAIR = Repair(
    edits=(
        last(
            "megatron.core.distributed.distributed_data_parallel"
            ":DistributedDataParallel.zero_grad_buffer",
            """
            if getattr(self.config, 'num_moe_experts', None):
                # finalize_model_grads() has not reset them if the last window was aborted.
                from .finalize_model_grads import reset_model_temporary_tensors

                reset_model_temporary_tensors(self.config, [self])
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_finalize_model_grads.py",
        "distributed/test_distributed_data_parallel.py",
    ),
    rereads=(
        "deferred-reduction-refused",
        "finish-grad-sync-twice",
        "first-window-aborted",
        "frozen-parameters-refused",
        "grad-left-by-aborted-backward",
        "gradient-after-reduction",
        "layerwise-gather-erases-gradients",
        "no-sync-ends-early",
        "reduction-outlives-its-window",
        "second-window-not-reduced",
    ),
)
