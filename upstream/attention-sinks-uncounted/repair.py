"""Learnable attention sinks are marked as a shard, so that all ranks' heads are in the norm."""

from upstream.edits import Repair, after, last

REPAIR = Repair(
    edits=(
        after(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            "config.perform_initialization",
            """
            # Each rank has the offsets of its own heads.
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            """,
        ),
        last(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__",
            """
            if self.config.softmax_type == "learnable":
                # Each rank has the offsets of its own heads.
                set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            """,
        ),
    ),
    unit_tests=("transformer/test_attention.py",),
    ranks=2,
)
