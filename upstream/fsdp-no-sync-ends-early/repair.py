"""The last exit of Megatron-FSDP's `no_sync()` turns synchronisation on, as in DDP's."""

from upstream.edits import Repair, after, before, first, replace

FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp:MegatronFSDP"

REPAIR = Repair(
    edits=(
        after(f"{FSDP}.__init__", "self.microbatch_count = 0", "self.no_sync_contexts = set()"),
        first(f"{FSDP}.no_sync", "context = object()"),
        before(
            f"{FSDP}.no_sync",
            "self.is_last_microbatch = False",
            "self.no_sync_contexts.add(context)",
        ),
        replace(
            f"{FSDP}.no_sync",
            "self.is_last_microbatch = True",
            """
            self.no_sync_contexts.discard(context)
            self.is_last_microbatch = not self.no_sync_contexts
            """,
        ),
        before(
            f"{FSDP}.zero_grad_buffer",
            "for param in self.module.parameters()",
            """
            # Contexts that are still open belong to a window that has ended.
            self.no_sync_contexts.clear()
            """,
        ),
    ),
    unit_tests=("distributed/mfsdp_v1/test_mcore_fully_sharded_data_parallel.py",),
    rereads=("fsdp-backward-aborted",),
)
