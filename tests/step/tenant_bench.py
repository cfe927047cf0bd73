"""Several adapters on one base model, each in a DDP of its own, with an optimizer and a step.

Runs on a rank. Each tenant's run is compared with that of a model that has its adapter alone,
stepped at once by Megatron itself.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from lora import Lora, use
from scenario import (
    DEADLINE_S,
    ROWS,
    TokenLoss,
    build,
    cut,
    data,
    forward,
    one_shot,
    scheduler_of,
)

import megatron_idempotent


@dataclasses.dataclass
class Tenant:
    """An adapter with its DDP, optimizer, scheduler and step."""

    name: str
    model: Any
    scheduler: Any
    step: megatron_idempotent.TrainStep
    replica: int
    step_id: str = ""

    def begin(self, loss: Any = None) -> None:
        self.step_id = self.step.begin(
            loss or TokenLoss(), global_batch_size=8, micro_batch_size=ROWS
        )

    def microbatch(self, batch: Any, **more: Any) -> Any:
        return self.step.microbatch(self.step_id, batch, **more)

    def finish(self) -> Any:
        return self.step.finish(self.step_id)

    def batches(self, number: int, sizes: list[int]) -> list[Any]:
        """Return its batches in its step of that number, of so many microbatches each."""
        return list(cut(rows_of(self.name, number, sum(sizes), self.replica), sizes))

    def gradients(self) -> torch.Tensor:
        """Return what it has accumulated so far."""
        return self.model.gradients()


def rows_of(name: str, number: int, microbatches: int, replica: int) -> Any:
    """Return a tenant's rows in its step of that number."""
    return data(100 * ord(name[0]) + number, microbatches * ROWS, replica)


def own(module: Any, name: str) -> list[Any]:
    """The parameters of an adapter."""
    return [p for path, p in module.named_parameters() if f"adapters.{name}." in path]


def only(modules: list[Any], *names: str) -> None:
    """Let the parameters of these adapters be trained, and no others."""
    for module in modules:
        module.requires_grad_(False)
        for name in names:
            for parameter in own(module, name):
                parameter.requires_grad_(True)


def tenants(names: tuple[str, ...], **options: Any) -> list[Tenant]:
    """Build one base model, and for each name an adapter, a DDP and a step of its own.

    The config is wired for the first one. Each has twice the loss scale of the one before it.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import get_megatron_optimizer

    def prepare(module: Any) -> None:
        Lora(adapters=names, alike=True)(module)
        only([module], names[0])

    model, scheduler, replica = build(before_ddp=prepare, **options)
    modules = [chunk.module for chunk in model.chunks]
    models = [(model, scheduler)]
    for index, name in enumerate(names[1:], start=1):
        only(modules, name)
        settings = copy.copy(model.chunks[0].ddp_config)
        chunks = [DistributedDataParallel(model.config, settings, each) for each in modules]
        config = copy.copy(model.optimizer.config)
        if config.loss_scale:
            config.loss_scale *= 2**index
        optimizer = get_megatron_optimizer(config, chunks)
        another = dataclasses.replace(model, chunks=chunks, optimizer=optimizer)
        models.append((another, scheduler_of(optimizer)))
    only(modules, *names)
    found = []
    for name, (model, scheduler) in zip(names, models, strict=True):
        seed(name)
        found.append(Tenant(name, model, scheduler, step_of(model, scheduler, name), replica))
    seed("process")
    return found


def step_of(model: Any, scheduler: Any, name: str, **more: Any) -> megatron_idempotent.TrainStep:
    """The step of a tenant, whose forward uses its adapter."""

    def adapted(chunk: Any, microbatch: Any) -> Any:
        use(model.chunks, name)
        return forward(chunk, microbatch)

    return megatron_idempotent.TrainStep(
        model.chunks,
        model.optimizer,
        scheduler,
        **{"forward": adapted, "deadline_s": DEADLINE_S, "tenant": name, **more},
    )


def seed(name: str) -> None:
    """Set the random states, others for each name."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(ord(name[0]))
    torch.manual_seed(ord(name[0]))


def parameters(tenant: Tenant) -> torch.Tensor:
    """The adapter's values, gathered first."""
    megatron_idempotent.ensure_params_synced(tenant.model.chunks)
    return torch.cat(
        [p.detach().reshape(-1) for c in tenant.model.chunks for p in own(c.module, tenant.name)]
    )


def biases(chunks: Any) -> list[torch.Tensor]:
    """The routers' biases, which each step moves."""
    found = [m.expert_bias for c in chunks for m in c.modules() if hasattr(m, "expert_bias")]
    return [bias.clone() for bias in found if bias is not None]


def logged() -> list[torch.Tensor]:
    """Return what MoE layers have logged since the last call."""
    from megatron_idempotent.step import snapshot

    found = [value.clone() for value in snapshot.logged()]
    for value in snapshot.logged():
        value.zero_()
    return found


def alone(name: str, microbatches: list[int], **options: Any) -> list[list[Any]]:
    """Return norm, adapter, biases and logs after each step of a model with this adapter only."""
    model, scheduler, replica = build(before_ddp=Lora(adapters=(name,), alike=True), **options)
    seed(name)
    logged()
    found = []
    for number, microbatches_of_step in enumerate(microbatches, start=1):
        batch = rows_of(name, number, microbatches_of_step, replica)
        norm = one_shot(model, scheduler, TokenLoss(), batch)
        megatron_idempotent.ensure_params_synced(model.chunks)
        values = [p for c in model.chunks for p in own(c.module, name)]
        found.append(
            [
                torch.tensor(float(norm)),
                torch.cat([p.detach().reshape(-1) for p in values]),
                *biases(model.chunks),
                *logged(),
            ]
        )
    return found
