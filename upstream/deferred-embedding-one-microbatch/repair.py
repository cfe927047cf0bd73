"""The deferred gradient of an output layer can be that of one microbatch."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.utils:drain_embedding_wgrad_compute",
            "for i in range(len(embedding_activation_buffer))",
            "drain_idx = 0  # with one microbatch the loop does not run\n\n",
        ),
    ),
    unit_tests=("test_utils.py",),
    # Their wrappers of this function name nothing that they rely on.
    rereads=("deferred-embedding-mispaired", "deferred-embedding-reduced-early"),
)
