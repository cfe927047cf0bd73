"""Without Transformer Engine no layer counts as one of its inference layers."""

from upstream.edits import Repair, first

REPAIR = Repair(
    edits=(
        first(
            "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
            """
            if not HAVE_TE:
                return False  # the classes are mocks, which isinstance() does not accept
            """,
        ),
    ),
    unit_tests=("transformer/test_multi_token_prediction.py",),
)
