"""Zeroing gradients of Megatron-FSDP drops the state of a backward pass that raised."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp"
            ":MegatronFSDP.zero_grad_buffer",
            "for param in self.module.parameters()",
            """
            if self._root_pre_backward_hook_issued:
                # The last backward pass raised, so that its root post-backward hook has not run.
                self._root_pre_backward_hook_issued = False
                self.microbatch_count = 0
                for grad_ready_params in self.grad_reduce_pipeline.bucket_grad_ready_params:
                    grad_ready_params.clear()
                self.grad_reduce_pipeline.reset()
                for param in self.raw_param.values():
                    param.grad = None
                for module in self.module.modules():
                    module._training_state = TrainingState.IDLE
            """,
        ),
    ),
    unit_tests=("distributed/mfsdp_v1/test_mcore_fully_sharded_data_parallel.py",),
    ranks=2,
    rereads=("fsdp-no-sync-ends-early",),
)
