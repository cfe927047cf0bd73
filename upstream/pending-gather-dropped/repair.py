"""A forward without module hooks first gathers the update that a step has left to them."""

from upstream.edits import Repair, after, before

INIT = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"
COPY = (
    "megatron.core.optimizer.distrib_optimizer"
    ":DistributedOptimizer._copy_main_params_to_model_params"
)

REPAIR = Repair(
    edits=(
        after(
            INIT,
            "self.overlap_param_gather_with_optimizer_step = False",
            """
            self.param_sync_pending = False

            # A step leaves the param all-gather to the hooks of the modules, which may be off.
            @torch.no_grad()
            def finish_pending_param_sync(ddp, *unused):
                if ddp.remove_forward_pre_hook_handles or is_graph_capturing():
                    return
                bucket_groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
                if ddp.param_sync_pending and not all(
                    bucket_group.param_gather_dispatched for bucket_group in bucket_groups
                ):
                    ddp.start_param_sync(force_sync=True)
                    ddp.param_sync_pending = False

            if self.use_forward_hook:
                self.register_forward_pre_hook(finish_pending_param_sync)
            """,
        ),
        before(
            COPY,
            "if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8",
            """
            for model_chunk in self.model_chunks:
                model_chunk.param_sync_pending = self.ddp_config.overlap_param_gather
            """,
        ),
    ),
    unit_tests=(
        "distributed/test_distributed_data_parallel.py",
        "distributed/test_param_readiness.py",
        "test_optimizer.py",
    ),
    ranks=2,
)
