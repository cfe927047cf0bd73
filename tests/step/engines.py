"""The same bench for both engines of a split step. Runs on a rank."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

ENGINES = ["megatron", "fsdp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A step on a small model."""

    step: Any
    replica: int
    #: All parameters, in one vector.
    parameters: Callable[[], Any]
    #: Tensors that the next step depends on, those of the parameters among them.
    state: Callable[[], list[Any]]
    #: Goes on after a poisoned session; None where only new processes do.
    rebuild: Callable[[], Any] | None

    def digest(self) -> str:
        """Names of the state."""
        digest = hashlib.sha256()
        for tensor in self.state():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def class_of(engine: str) -> Any:
    import megatron_idempotent

    name = {"megatron": "TrainStep", "fsdp": "FSDPTrainStep"}[engine]
    return getattr(megatron_idempotent, name)


def bench_on(engine: str, kind: Any = None, *, step: Any = None, **options: Any) -> Bench:
    """A bench, with what else is given to the step.

    `kind` is the class of the step, if not the engine's. `options` are those of `cpu.tiny.build`,
    for Megatron.
    """
    import split_bench

    import megatron_idempotent

    kind = kind or class_of(engine)
    given = {"deadline_s": split_bench.DEADLINE_S, **(step or {})}
    if engine == "fsdp":
        import fsdp_bench
        import torch

        parts = fsdp_bench.build()
        return Bench(
            step=kind(*parts, **given),
            replica=torch.distributed.get_rank(),
            parameters=lambda: fsdp_bench.parameters(parts[0]),
            state=lambda: fsdp_bench.state(*parts),
            rebuild=None,
        )
    model, scheduler, replica = split_bench.build(**options)
    chunks, optimizer = model.chunks, model.optimizer
    return Bench(
        step=kind(chunks, optimizer, scheduler, forward=split_bench.forward, **given),
        replica=replica,
        parameters=lambda: split_bench.parameters(model),
        state=lambda: split_bench.state(model, scheduler),
        rebuild=lambda: megatron_idempotent.window.rebuild_process_groups(chunks, optimizer),
    )
