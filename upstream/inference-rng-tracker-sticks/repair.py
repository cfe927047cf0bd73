"""`initialize_rng_tracker()` replaces an inference tracker by one for training."""

from upstream.edits import Repair, before, wrap

_RANDOM = "megatron.core.tensor_parallel.random"

REPAIR = Repair(
    edits=(
        before(
            f"{_RANDOM}:initialize_rng_tracker",
            "if force_reset",
            """
            # An inference tracker ignores all seeds, so training cannot go on with it.
            if getattr(_CUDA_RNG_STATE_TRACKER, "is_inference_rng_tracker", False):
                force_reset = force_reset or not inference_rng_tracker
            """,
        ),
        wrap(
            f"{_RANDOM}:get_cuda_rng_tracker",
            "initialize_rng_tracker",
            "if not _CUDA_RNG_STATE_TRACKER_INITIALIZED:",
        ),
    ),
    unit_tests=("tensor_parallel/test_random.py",),
    ranks=2,
)
