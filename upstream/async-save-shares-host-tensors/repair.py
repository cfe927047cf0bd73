"""While it preloads, a persistent worker copies host tensors that the trainer shares with it."""

from upstream.edits import Repair, before, substitute

PRELOAD = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async"
    ":FileSystemWriterAsync.preload_tensors"
)

REPAIR = Repair(
    edits=(
        before(
            PRELOAD,
            "tensor_list.append(",
            """
            # A persistent worker shares host tensors with the trainer, which goes on
            # changing them once this function has returned.
            copy = tensor.is_shared()
            """,
        ),
        substitute(PRELOAD, "non_blocking=non_blocking)", "non_blocking=non_blocking, copy=copy)"),
    ),
    unit_tests=("dist_checkpointing/test_async_save.py",),
)
