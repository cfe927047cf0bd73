"""Pipeline stages with the same seed start from the same weights and drop the same units.

Symptom:
    With pipeline parallelism, in a program that gives every rank the same seed, the layers of all
    stages have identical initial weights and identical dropout masks. No error.

Cause:
    `model_parallel_cuda_manual_seed` offsets the seed by tensor- and expert-parallel rank, not by
    pipeline rank. `megatron.training.initialize._set_random_seed` adds 100 × pipeline rank before
    it calls that function; other programs have to do so themselves.

Affects:
    Every release, with pipeline parallelism. What the patch does: after seeding, the ranks of each
    pipeline group compare their random states (one all-gather of 8 bytes, none without pipeline
    parallelism; all ranks of the group must seed, as they already do). If the states are equal, all
    ranks seed again, with 100 × pipeline rank added: seed 42 becomes 42, 142, 242, … If they
    differ, the caller or upstream has added an offset, and the patch adds none: an offset is never
    applied twice.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/pull/1212 adds the offset in SkyRL's worker.

Remove when:
    `model_parallel_cuda_manual_seed` takes the pipeline rank into account. By design: the function
    cannot tell whether its caller has already added the pipeline rank's offset, and another default
    would change the bits of programs that do.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.training import STAGE_OFFSET

from ._case import Fault, Original, Patch, a_body_has, gathered, target


def seed_all_stages(original: Original, seed: int, *args: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's seeding: if all pipeline stages have the same random states, seed again.
    Each stage then adds an offset of its own to the seed. A collective over the pipeline.
    """
    result = original(seed, *args, **kwargs)
    offset = _missing_offset()
    if offset is not None:
        # On all stages, even the first: all ranks must make the same calls of upstream.
        result = original(seed + offset, *args, **kwargs)
    return result


def _missing_offset() -> int | None:
    """Return what this stage has to add to its seed; None if no stage has to add anything.
    That is so without pipeline stages, or if the stages' random states differ already. A collective
    over the pipeline.
    """
    import torch
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return None
    group = parallel_state.get_pipeline_model_parallel_group()
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    local = torch.tensor([_drawn_from()], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(local) for _ in range(stages)]
    # All ranks of the pipeline group must enter: the gather hangs otherwise.
    torch.distributed.all_gather(gathered, local, group=group)
    if any(int(peer) != int(local) for peer in gathered):
        return None
    return STAGE_OFFSET * int(parallel_state.get_pipeline_model_parallel_rank())


def _drawn_from() -> int:
    """Return a 64-bit digest of the random states that weights and dropout are drawn from.

    A digest of the seed would not do, because upstream may add an offset to it.
    """
    import hashlib

    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {"": torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    digest = hashlib.sha256()
    for name, state in sorted(states.items()):
        if isinstance(state, torch.Generator):  # for CUDA graphs
            state = state.get_state()
        digest.update(name.encode() + bytes(state.cpu().numpy()))
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def reproduce() -> None:
    """Seed two pipeline stages with the same seed, and draw random numbers.
    On stock Megatron both stages draw the same numbers.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    random.model_parallel_cuda_manual_seed(42)
    with random.get_cuda_rng_tracker().fork():
        drawn = torch.rand(8, device=torch.cuda.current_device())
    group = parallel_state.get_pipeline_model_parallel_group()
    if torch.equal(*gathered(drawn, group)):
        raise Fault("pipeline stages 0 and 1 draw the same weights")


def control(*, helped: bool) -> list[bytes]:
    """Seed two pipeline stages differently, by hand or (`helped`) by `seed_all`, as a control.
    Return the random numbers that are drawn.
    """
    import random

    import numpy
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from megatron_idempotent import seed_all

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    drawn = []
    for number in (42, 7):
        if helped:
            seed_all(number)
        else:
            seed = number + STAGE_OFFSET * parallel_state.get_pipeline_model_parallel_rank()
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            weights = torch.rand(8, device=torch.cuda.current_device())
        drawn += [
            weights.cpu().numpy().tobytes(),
            torch.rand(8).numpy().tobytes(),
            numpy.random.bytes(8),
            random.randbytes(8),
        ]
    return drawn


PATCH = Patch(
    "pipeline stages given one seed get identical initial weights and dropout",
    target(
        "random.model_parallel_cuda_manual_seed",
        seed_all_stages,
        "offset = seed + 2718",
        "data_parallel_seed = seed",
        "_CUDA_RNG_STATE_TRACKER.reset()",
        "initialize_rng_tracker",
    ),
    fixed_when=a_body_has("get_pipeline_model_parallel_rank()"),
)
