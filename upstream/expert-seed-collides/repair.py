"""Seeding moves the seed of expert layers if that of tensor parallelism is the same."""

from upstream.edits import Repair, after

REPAIR = Repair(
    edits=(
        after(
            "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed",
            "expert_parallel_seed = seed + 1024",
            """
            if expert_parallel_seed == tensor_model_parallel_seed:
                # From expert rank 16 on the two ranges meet. No other seed is this large.
                expert_parallel_seed += 2**30
            """,
        ),
    ),
    unit_tests=("tensor_parallel/test_random.py",),
)
