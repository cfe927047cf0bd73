"""The same bench for both engines of a split step. Runs on a rank."""

from __future__ import annotations


def class_of(engine):
    import megatron_idempotent

    name = {"megatron": "TrainStep", "fsdp": "FSDPTrainStep"}[engine]
    return getattr(megatron_idempotent, name)


def step_on(engine, kind=None, **options):
    """A step on a small model, this rank's data-parallel rank, and a reader of all parameters.

    `kind` is the class of the step, if not the engine's. `options` are those of `cpu.tiny.build`,
    for Megatron.
    """
    import split_bench

    kind = kind or class_of(engine)
    if engine == "fsdp":
        import fsdp_bench
        import torch

        parts = fsdp_bench.build()
        step = kind(*parts, deadline_s=split_bench.DEADLINE_S)
        return step, torch.distributed.get_rank(), lambda: fsdp_bench.parameters(parts[0])
    model, scheduler, replica = split_bench.build(**options)
    step = kind(
        model.chunks,
        model.optimizer,
        scheduler,
        forward=split_bench.forward,
        deadline_s=split_bench.DEADLINE_S,
    )
    return step, replica, lambda: split_bench.parameters(model)
