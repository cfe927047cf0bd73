"""Expert-parallel ranks resume with the random states of one of them.

Symptom:
    After a load each expert-parallel rank draws the same numbers as the first: forced load
    balancing sends their tokens to the same experts, dropout in experts has the same masks. A run
    that resumes from a checkpoint differs from one that continues.

Cause:
    `get_rng_state` identifies a replica by its data-parallel rank, so that only one replica's
    states are saved; but the tracker's `expert-parallel-rng` differs between expert-parallel ranks.

Affects:
    Every release with `--ckpt-format torch_dist`. Releases before 0.17 carry `megatron.training` in
    a source checkout only. Megatron-Bridge, slime and miles save one state for each replica. What
    the patch does: the saved states also contain that of each expert-parallel rank, and a load
    gives each rank its own. Older checkpoints, and those loaded with a different number of
    expert-parallel ranks, load as before. Versions without the patch can load its checkpoints.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/6858, merged on 2026-08-25.

Remove when:
    `get_rng_state` saves a state per expert-parallel rank. `upstream/expert-random-states-shared`
    has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, address, program, shared_folder, target

_STREAM = "expert-parallel-rng"
_OF_ALL = "expert_parallel_rng_of_ranks"


def get_rng_state(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Collect the random states to save, with the expert streams of all expert-parallel ranks.
    A collective over these ranks.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    states = original(*args, **kwargs)
    if (
        isinstance(states, ShardedObject)
        and parallel_state.get_expert_model_parallel_world_size() > 1
    ):
        group = parallel_state.get_expert_model_parallel_group()
        of_ranks: list[Any] = [None] * group.size()
        stream = states.data[0]["rng_tracker_states"].get(_STREAM)
        torch.distributed.all_gather_object(of_ranks, stream, group=group)
        states.data[0][_OF_ALL] = of_ranks
    return states


def load_base_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap the read of a checkpoint: in its random states, replace the stream for expert layers by
    the one that was saved for this expert-parallel rank.
    """
    from megatron.core import parallel_state

    loaded = original(*args, **kwargs)
    state_dict, *_ = loaded
    states: Any = (state_dict or {}).get("rng_state")
    of_ranks = states[0].get(_OF_ALL, ()) if isinstance(states, list) else ()
    if len(of_ranks) > 1 and len(of_ranks) == parallel_state.get_expert_model_parallel_world_size():
        stream = of_ranks[parallel_state.get_expert_model_parallel_rank()]
        for state in states:
            state["rng_tracker_states"][_STREAM] = stream
    return loaded


def reproduce() -> None:
    """Save and load on two expert-parallel ranks; compare each rank's random stream for experts.
    On stock Megatron both ranks have the first rank's stream after the load.
    """
    import torch
    from megatron.core.tensor_parallel import random
    from megatron.training import checkpointing

    options = ["--ckpt-format", "torch_dist", "--no-save-optim", "--no-load-optim"]
    experts = ["--num-experts", "2", "--expert-model-parallel-size", "2"]
    running = program([*options, *experts])
    running.args.save = running.args.load = shared_folder()
    tracker = random.get_cuda_rng_tracker()
    saved_stream = tracker.get_states()[_STREAM].clone()
    checkpointing.save_checkpoint(1, running.chunks, None, None, 0)
    checkpointing.load_checkpoint(running.chunks, None, None)
    if not torch.equal(tracker.get_states()[_STREAM], saved_stream):
        rank = torch.distributed.get_rank()
        raise Fault(f"rank {rank} has the {_STREAM} of another rank after a load")


PATCH = Patch(
    "expert-parallel ranks resume with the random states of one of them",
    target(
        "checkpointing.get_rng_state",
        get_rng_state,
        "tensor_parallel.get_cuda_rng_tracker().get_states()",
    ),
    target(
        "checkpointing._load_base_checkpoint",
        load_base_checkpoint,
        "_load_global_dist_base_checkpoint",
    ),
    needs=("psutil",),
    # As on dev since January 2026, and in commits that slime and miles pin.
    fixed_when=a_body_has("ep_size = mpu.get_expert_model_parallel_world_size()"),
    fixed_by=(
        (
            address("checkpointing.get_rng_state"),
            "rng_state['expert_parallel_rng_states'] = ep_rng_states",
        ),
    ),
)
