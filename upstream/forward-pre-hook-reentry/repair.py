"""`disable_forward_pre_hook()` removes the hooks that exist; enabling them twice adds none."""

from upstream.edits import Repair, replace

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

REPAIR = Repair(
    edits=(
        replace(
            f"{DDP}.enable_forward_pre_hook",
            "assert len(self.remove_forward_pre_hook_handles) == 0",
            """
            if self.remove_forward_pre_hook_handles:
                return
            """,
        ),
        replace(
            f"{DDP}.disable_forward_pre_hook",
            "for module in self.module.modules()",
            """
            for handle in self.remove_forward_pre_hook_handles.values():
                handle.remove()
            """,
        ),
        replace(
            f"{DDP}.disable_forward_pre_hook",
            "assert len(self.remove_forward_pre_hook_handles) == 0",
            "self.remove_forward_pre_hook_handles.clear()",
        ),
    ),
    unit_tests=(
        "distributed/test_distributed_data_parallel.py",
        "distributed/test_param_readiness.py",
    ),
    rereads=("pending-gather-dropped",),
)
