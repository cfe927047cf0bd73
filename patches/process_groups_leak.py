"""`destroy_model_parallel()` leaves the process groups alive.

Symptom:
    Each cycle of `initialize_model_parallel()` and `destroy_model_parallel()` leaves some twenty
    process groups per rank, with their communicators, threads and memory: 24 live groups become 224
    in ten cycles. In a test suite on GPUs with NVLink SHARP, a later test fails with `Failed to
    bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'`. A few
    of the module's globals still refer to old layouts.

Cause:
    The function sets its globals to None. torch.distributed keeps every group alive until
    `destroy_process_group(group)`, which is called for the gloo groups only.

Affects:
    Every release. What the patch does: after upstream's function it destroys the groups without any
    other reference; for that it collects garbage once, because a deleted model is a reference
    cycle. A group that a model, an optimizer or a variable still refers to stays alive and usable,
    as in upstream, and is never destroyed later: delete the model first. Globals that upstream does
    not reset are reset.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/parallel_state.py,
    `destroy_model_parallel`. https://github.com/NVIDIA/Megatron-LM/issues/6897,
    "parallel_state.destroy_model_parallel leaks NCCL process groups", counts ~20 process groups per
    cycle; https://github.com/NVIDIA/Megatron-LM/pull/6902, "destroy the process groups it created",
    is the fix that it proposes.

Remove when:
    `destroy_model_parallel()` destroys the groups that `initialize_model_parallel()` created.
    `upstream/process-groups-leak` has the repair.
"""

from __future__ import annotations

from megatron_idempotent.megatron.process_groups import alive, held, live_groups

from ._case import Fault, Original, Patch, address, target


def destroy(original: Original) -> None:
    """Wrap `destroy_model_parallel`: also destroy process groups that nothing else refers to."""
    import gc

    import torch.distributed as dist

    groups = live_groups()
    original()
    _reset_globals()
    are_held = held(groups)
    if any(are_held):
        gc.collect()
        are_held = held(groups)
    # In the order of the module's globals, which is the same on all ranks.
    for group, is_held in zip(groups, are_held, strict=True):
        if not is_held and group in alive():
            dist.destroy_process_group(group)


def _reset_globals() -> None:
    """Set each global of `parallel_state` that still is a process group to None, and empty each
    list or dict there that still contains one.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
        elif isinstance(value, list | dict):
            items = value.values() if isinstance(value, dict) else value
            if any(isinstance(item, dist.ProcessGroup) for item in items):
                value.clear()


def reproduce() -> None:
    """Initialize and destroy model parallelism three times, and count torch's process groups.
    On stock Megatron no group is destroyed.
    """
    from megatron.core import parallel_state

    count_before = len(alive())
    for _ in range(3):
        parallel_state.initialize_model_parallel()
        parallel_state.destroy_model_parallel()
    leaked = len(alive()) - count_before
    if leaked:
        raise Fault(f"{leaked} process groups are left over from 3 cycles")


PATCH = Patch(
    "destroy_model_parallel() leaves its process groups alive: some 20 more per cycle",
    target("core.parallel_state:destroy_model_parallel", destroy),
    fixed_by=(
        (
            address("core.parallel_state:destroy_model_parallel"),
            "torch.distributed.destroy_process_group(group)",
        ),
    ),
    loudness="both",
)
