"""A snapshot of the random states advances with the tracker that it was restored to.

Symptom:
    A second roll back to the same snapshot draws other dropout masks than the first. So does a
    second backward through a recomputed layer (`retain_graph=True`), which then differentiates a
    different function than the forward computed; and a run from the checkpoint that
    `RerunStateMachine` saves after a rerun in place, to repeat that step. No error.

Cause:
    `get_states` returns a copy of its dictionary, but `set_states` keeps the caller's dictionary:
    each later `fork` writes its final state into the caller's snapshot.

Affects:
    Every release, with Megatron's own tracker, not with that of Transformer Engine
    (`--te-rng-tracker`). With `use_cudagraphable_rng` the states are generators, which advance in
    any dictionary. What the patch does: the tracker keeps its own copy of the dictionary.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/tensor_parallel/random.py,
    `CudaRNGStatesTracker.set_states`; no thread found.

Remove when:
    `set_states` copies the dictionary. `upstream/rng-states-shared` has the repair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._case import Fault, Original, Patch, address, target


def set_states(original: Original, self: Any, states: Mapping[str, Any]) -> None:
    """Wrap the RNG tracker's `set_states`: set a copy of the caller's dictionary of states."""
    original(self, dict(states))


def reproduce() -> None:
    """Restore the random states twice from one snapshot, and draw numbers each time.
    On stock Megatron the second draw differs, because the first one advanced the snapshot.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel()
    random.model_parallel_cuda_manual_seed(1)
    tracker = random.get_cuda_rng_tracker()
    snapshot, drawn = tracker.get_states(), []
    for _ in range(2):
        tracker.set_states(snapshot)
        with tracker.fork():
            drawn.append(torch.rand(8, device=torch.cuda.current_device()))
    if not torch.equal(*drawn):
        raise Fault("the second roll back to one snapshot draws other numbers")


PATCH = Patch(
    "a snapshot of the random states changes once it was rolled back to",
    target("random.CudaRNGStatesTracker.set_states", set_states, "self.states_ = states"),
    fixed_by=((address("random.CudaRNGStatesTracker.set_states"), "self.states_ = dict(states)"),),
    ranks=1,
)
