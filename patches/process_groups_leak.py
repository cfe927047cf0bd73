"""`destroy_model_parallel()` leaves the process groups alive.

Symptom:
    Each cycle of `initialize_model_parallel()` and `destroy_model_parallel()` leaves some twenty
    process groups per rank, with their communicators, threads and memory: 24 live groups become 224
    in ten cycles. In a test suite on GPUs with NVLink SHARP, a later test fails with `Failed to
    bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'`. A few
    of the module's globals go on pointing at dead layouts.

Cause:
    The function sets its globals to None. torch.distributed keeps every group alive until
    `destroy_process_group(group)`, which is called for the gloo groups only.

Affects:
    Every release. What the patch does: it then destroys those of the groups that nobody holds any
    more; for that it collects garbage once, as a dead model is a reference cycle. A group that a
    model, an optimizer or a variable still refers to stays alive and usable, as upstream leaves it,
    and is never destroyed later: drop the model first. Globals that upstream forgets are reset.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/parallel_state.py,
    `destroy_model_parallel`. https://github.com/NVIDIA/Megatron-LM/issues/6897,
    "parallel_state.destroy_model_parallel leaks NCCL process groups", counts ~20 process groups per
    cycle; https://github.com/NVIDIA/Megatron-LM/pull/6902, "destroy the process groups it created",
    is the fix that it proposes.

Remove when:
    `destroy_model_parallel()` destroys what `initialize_model_parallel()` made.
"""

from __future__ import annotations

from megatron_idempotent.megatron.process_groups import alive, held, live_groups

from ._case import Fault, Original, Patch, target


def destroy(original: Original) -> None:
    """Let upstream drop the groups, then destroys those that nothing else refers to."""
    import gc

    import torch.distributed as dist

    groups = live_groups()
    original()
    _reset_globals()
    are_held = held(groups)
    if any(are_held):
        gc.collect()
        are_held = held(groups)
    # In one order on all ranks: that of the module's globals.
    for group, is_held in zip(groups, are_held, strict=True):
        if not is_held and group in alive():
            dist.destroy_process_group(group)


def _reset_globals() -> None:
    """Empty the globals that upstream leaves set, as its module declares them."""
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
    """Run three cycles, then count the groups that torch.distributed still knows."""
    from megatron.core import parallel_state

    before = len(alive())
    for _ in range(3):
        parallel_state.initialize_model_parallel()
        parallel_state.destroy_model_parallel()
    left = len(alive()) - before
    if left:
        raise Fault(f"{left} process groups are left over from 3 cycles")


PATCH = Patch(
    "destroy_model_parallel() leaves its process groups alive: some 20 more per cycle",
    target("core.parallel_state:destroy_model_parallel", destroy),
)
