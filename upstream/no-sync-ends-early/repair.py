"""The last exit of `no_sync()` turns synchronisation on, and exits of an earlier window do not."""

from upstream.edits import Repair, after, before, first, replace

GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.__init__"
NO_SYNC = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.no_sync"

REPAIR = Repair(
    edits=(
        after(GROUP, "self.is_last_microbatch = True", "self.no_sync_contexts = set()"),
        first(NO_SYNC, "context = object()"),
        before(
            NO_SYNC,
            "bucket_group.is_last_microbatch = False",
            """
            if bucket_group.is_last_microbatch:
                # Contexts that are still open belong to a window that reset() has ended.
                bucket_group.no_sync_contexts.clear()
            bucket_group.no_sync_contexts.add(context)
            """,
        ),
        replace(
            NO_SYNC,
            "bucket_group.is_last_microbatch = True",
            """
            bucket_group.no_sync_contexts.discard(context)
            bucket_group.is_last_microbatch = not bucket_group.no_sync_contexts
            """,
        ),
    ),
    unit_tests=("distributed/test_distributed_data_parallel.py",),
    rereads=("deferred-reduction-refused",),
)
