"""A MoE layer cuts a padding mask that is longer than its part of the sequence."""

from upstream.edits import Repair, before

REPAIR = Repair(
    edits=(
        before(
            "megatron.core.transformer.moe.moe_layer:MoELayer.forward",
            "if padding_mask is not None",
            """
            if padding_mask is not None and padding_mask.shape[1] != hidden_states.shape[0]:
                # Only the first pipeline stage cuts the mask to its part of the sequence.
                padding_mask = tensor_parallel.scatter_to_sequence_parallel_region(
                    padding_mask.transpose(0, 1).contiguous(), group=self.attn_tp_group
                ).transpose(0, 1)
            """,
        ),
    ),
    unit_tests=("transformer/moe/test_moe_layer.py", "transformer/moe/test_routers.py"),
    ranks=2,
)
