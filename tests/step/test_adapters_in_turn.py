"""Several adapters over one base model, each with a DDP, an optimizer and a step of its own.

Their steps come one after another. Each adapter's run is compared with that of a model that has
this adapter alone, stepped at once by Megatron itself.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from lora import Lora, use
from ranks import on_ranks, tiered
from scenario import (
    DEADLINE_S,
    ROWS,
    TokenLoss,
    build,
    cut,
    data,
    documented,
    forward,
    one_shot,
    raised_by,
    scheduler_of,
)

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny

pytestmark = pytest.mark.full

GATHERS = {"overlap_param_gather": True}
SMALL = {"ddp_overrides": {"bucket_size": 600}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2, gathers": (2, GATHERS | SMALL),
    "dp2, no overlap": (2, {"overlap_grad_reduce": False}),
    "dp2, fp16": (2, {"dtype": "fp16", "loss_scale": 256.0}),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2 dp2, gathers": (4, {"pp": 2} | GATHERS),
    "pp2 vpp2 dp2, aligned": (
        4,
        {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True} | GATHERS,
    ),
}
ALWAYS = ("dp2, gathers", "pp2")
NAMES = ("alice", "bob")


@dataclasses.dataclass
class Trained:
    """An adapter with its model, scheduler and step."""

    name: str
    model: Any
    scheduler: Any
    step: megatron_idempotent.TrainStep
    replica: int

    def begin(self) -> str:
        train_only(self.model.chunks, self.name)
        return self.step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)

    def batches(self, number: int, sizes: list[int]) -> list[Any]:
        return list(cut(rows_of(self.name, number, sum(sizes), self.replica), sizes))

    def run(self, number: int, sizes: list[int], *, last: bool) -> Any:
        step_id = self.begin()
        for index, batch in enumerate(self.batches(number, sizes), start=1):
            self.step.microbatch(step_id, batch, last=last and index == len(sizes))
        return self.step.finish(step_id)


def rows_of(name: str, number: int, microbatches: int, replica: int) -> Any:
    """Return an adapter's rows in its step of that number."""
    return data(100 * ord(name[0]) + number, microbatches * ROWS, replica)


def parameters_of(chunks: Any, name: str) -> list[Any]:
    return [
        parameter
        for chunk in chunks
        for path, parameter in chunk.named_parameters()
        if f"adapters.{name}." in path
    ]


def values_of(chunks: Any, name: str) -> torch.Tensor:
    """Return an adapter's values, gathered first."""
    megatron_idempotent.ensure_params_synced(chunks)
    return torch.cat([p.detach().reshape(-1) for p in parameters_of(chunks, name)])


def train_only(chunks: Any, *names: str) -> None:
    """Let the parameters of these adapters be trained, and no others."""
    for chunk in chunks:
        chunk.requires_grad_(False)
    for name in names:
        for parameter in parameters_of(chunks, name):
            parameter.requires_grad_(True)


def trained(**options: Any) -> list[Trained]:
    """Build one base model, and for each name an adapter, a DDP and a step.

    The config is wired for the first one. The second has twice its loss scale.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import get_megatron_optimizer

    def prepare(module: Any) -> None:
        Lora(adapters=NAMES, alike=True)(module)
        train_only([module], NAMES[0])

    model, scheduler, replica = build(before_ddp=prepare, **options)
    modules = [chunk.module for chunk in model.chunks]
    models = [(model, scheduler)]
    for name in NAMES[1:]:
        train_only(modules, name)
        settings = copy.copy(model.chunks[0].ddp_config)
        chunks = [DistributedDataParallel(model.config, settings, module) for module in modules]
        config = copy.copy(model.optimizer.config)
        if config.loss_scale:
            config.loss_scale *= 2
        optimizer = get_megatron_optimizer(config, chunks)
        second = dataclasses.replace(model, chunks=chunks, optimizer=optimizer)
        models.append((second, scheduler_of(optimizer)))
    return [
        Trained(name, model, scheduler, step_of(model, scheduler, name), replica)
        for name, (model, scheduler) in zip(NAMES, models, strict=True)
    ]


def step_of(model: Any, scheduler: Any, name: str) -> megatron_idempotent.TrainStep:
    """Return the step of an adapter, whose forward uses it."""

    def adapted(chunk: Any, microbatch: Any) -> Any:
        use(model.chunks, name)
        return forward(chunk, microbatch)

    return megatron_idempotent.TrainStep(
        model.chunks, model.optimizer, scheduler, forward=adapted, deadline_s=DEADLINE_S
    )


def alone(name: str, sizes: list[list[int]], **options: Any) -> list[tuple[float, torch.Tensor]]:
    """Return norm and adapter after each step of a model with this adapter alone."""
    model, scheduler, replica = build(before_ddp=Lora(adapters=(name,), alike=True), **options)
    steps = []
    for number, parts in enumerate(sizes, start=1):
        norm = one_shot(model, scheduler, TokenLoss(), rows_of(name, number, sum(parts), replica))
        steps.append((float(norm), values_of(model.chunks, name)))
    return steps


def in_turn(options: dict[str, Any]) -> dict[str, list[tuple[bool, bool]]]:
    """Runs on a rank: for each step of each adapter, whether norm and values are its own run's."""
    # Another number in each step, because DDP learns when to reduce from the first one.
    sizes = [[2, 2], [4, 2], [2, 2]] if options.get("vpp") else [[1, 2], [2, 2], [1, 1]]
    adapters = trained(**options)
    steps: dict[str, list[tuple[float, torch.Tensor]]] = {name: [] for name in NAMES}
    for number, parts in enumerate(sizes, start=1):
        for adapter in adapters[:: 1 if number % 2 else -1]:
            # Gradients of a step that is dropped are in nobody's next step.
            step_id = adapter.begin()
            adapter.step.microbatch(step_id, adapter.batches(9, parts)[0])
            adapter.step.abort()
            norm = adapter.run(number, parts, last=number == 3).grad_norm
            steps[adapter.name].append((norm, values_of(adapter.model.chunks, adapter.name)))
    same = {}
    for index, name in enumerate(NAMES):
        scaled = {**options}
        if scaled.get("loss_scale"):
            scaled["loss_scale"] *= 2**index
        expected = alone(name, sizes, **scaled)
        assert expected[0][0] > 0
        same[name] = [
            (norm == expected_norm, torch.equal(values, expected_values))
            for (norm, values), (expected_norm, expected_values) in zip(
                steps[name], expected, strict=True
            )
        ]
    return same


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_each_adapters_steps_are_those_of_its_own_run(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    for same in megatron_ranks(ranks, in_turn, options, timeout_s=300):
        assert all(all(map(all, steps)) for steps in same.values()), same


@on_ranks(1)
def test_a_step_beside_an_open_one_over_the_same_modules_is_refused() -> None:
    alice, bob = trained()
    step_id = alice.begin()
    error = raised_by(bob.begin)
    assert isinstance(error, RuntimeError)
    assert "a TrainStep is open for another DDP over the same modules" in str(error)
    train_only(alice.model.chunks, "alice")
    alice.step.microbatch(step_id, alice.batches(1, [1])[0])
    assert alice.step.finish(step_id).updated
    assert bob.run(1, [1], last=False).updated


@on_ranks(1)
def test_the_documented_adapters_train() -> None:
    from megatron.core.optimizer import OptimizerConfig

    megatron_idempotent.apply()

    def prepare(module: Any) -> None:
        Lora(adapters=NAMES)(module)
        train_only([module])

    base = tiny.build(before_ddp=prepare, with_optimizer=False)
    (bare,) = base.chunks
    names: dict[str, Any] = {}
    exec(*documented("adapters"), names)
    for name in NAMES:

        def adapted(chunk: Any, microbatch: Any, name: str = name) -> Any:
            use([chunk], name)
            return forward(chunk, microbatch)

        settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        parts = [bare.module], base.config, bare.ddp_config, settings, adapted
        step = names["step_of"](name, *parts)
        step_id = step.begin(TokenLoss(), micro_batch_size=ROWS)
        step.microbatch(step_id, rows_of(name, 1, 2, 0))
        result = step.finish(step_id)
        assert result.updated
        assert result.grad_norm > 0
