"""The same bench for both engines of a split step. Runs on a rank."""

from __future__ import annotations


def step_on(engine, **options):
    """A step on a small model, this rank's data-parallel rank, and a reader of all parameters.

    `options` are those of `cpu.tiny.build`, for Megatron.
    """
    if engine == "fsdp":
        import fsdp_bench
        import torch

        parts = fsdp_bench.build()
        step, rank = fsdp_bench.step_of(*parts), torch.distributed.get_rank()
        return step, rank, lambda: fsdp_bench.parameters(parts[0])
    import split_bench

    from megatron_idempotent import TrainStep

    model, scheduler, replica = split_bench.build(**options)
    step = TrainStep(
        model.chunks,
        model.optimizer,
        scheduler,
        forward=split_bench.forward,
        deadline_s=split_bench.DEADLINE_S,
    )
    return step, replica, lambda: split_bench.parameters(model)
