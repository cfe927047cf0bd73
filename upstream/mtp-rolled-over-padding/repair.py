"""MTP shifts a pack by the borders that count the padding between its sequences."""

from upstream.edits import Repair, after

REPAIR = Repair(
    edits=(
        after(
            "megatron.core.transformer.multi_token_prediction:_roll_tensor_packed_seq",
            "cu_seqlens = packed_seq_params.cu_seqlens_q",
            """
            if packed_seq_params.cu_seqlens_q_padded is not None:
                # Tokens lie where the padded borders say, see rotary embeddings and attention.
                cu_seqlens = packed_seq_params.cu_seqlens_q_padded
            """,
        ),
    ),
    unit_tests=("transformer/test_multi_token_prediction.py",),
)
