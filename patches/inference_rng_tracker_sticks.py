"""Training after inference in one process keeps a random-number tracker that does nothing.

Symptom:
    A process that was seeded with `inference_rng_tracker=True`, and later for training, draws the
    same dropout masks on all tensor-parallel ranks, and the same initial weights if they should
    differ. No error.

Cause:
    The tracker is created once. The inference tracker ignores `add`, `set_states` and `fork`, and a
    later `model_parallel_cuda_manual_seed` keeps it.

Affects:
    Every release. From 0.14 on a caller can pass `force_reset_rng=True`. What the patch does:
    seeding for training replaces an inference tracker. Seeding for inference and reading the
    tracker do not change.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `initialize_rng_tracker`.

Remove when:
    seeding creates a tracker of the requested kind. `upstream/inference-rng-tracker-sticks` has the
    repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, arguments, gathered, target


def seed(original: Original, *args: Any, **kwargs: Any) -> None:
    """Wrap Megatron's seeding: when it seeds for training, first drop an inference RNG tracker."""
    from megatron.core.tensor_parallel import random

    tracker = random._CUDA_RNG_STATE_TRACKER
    if (
        getattr(tracker, "is_inference_rng_tracker", False)
        and not arguments(original, args, kwargs)["inference_rng_tracker"]
    ):
        random._CUDA_RNG_STATE_TRACKER = None
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    original(*args, **kwargs)


def reproduce() -> None:
    """Seed two tensor-parallel ranks for inference, then for training, and draw numbers.
    On stock Megatron both ranks draw the same numbers.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    random.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    random.model_parallel_cuda_manual_seed(1)
    with random.get_cuda_rng_tracker().fork():
        drawn = torch.rand(8, device=torch.cuda.current_device())
    group = parallel_state.get_tensor_model_parallel_group()
    if torch.equal(*gathered(drawn, group)):
        raise Fault("tensor-parallel ranks 0 and 1 draw the same dropout")


PATCH = Patch(
    "training after inference in one process shares dropout between tensor-parallel ranks",
    target(
        "random.model_parallel_cuda_manual_seed",
        seed,
        "_CUDA_RNG_STATE_TRACKER.reset()",
        "initialize_rng_tracker",
    ),
    groups=("generation",),
    fixed_by=(
        (address("random.initialize_rng_tracker"), "force_reset or not inference_rng_tracker"),
    ),
)
