"""`load_tensors_metadata()` creates tensors on the meta device from shape and dtype alone."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.core.dist_checkpointing.strategies.torch"
            ":TorchDistLoadShardedStrategy.load_tensors_metadata",
            "**tp.properties.__dict__",
            "dtype=tp.properties.dtype",
        ),
    ),
    unit_tests=("dist_checkpointing/test_serialization.py",),
)
