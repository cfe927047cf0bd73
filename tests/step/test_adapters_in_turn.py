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
from ranks import VIRTUAL, on_ranks, patch, tiered
from scenario import (
    ROWS,
    Bench,
    TokenLoss,
    build,
    data,
    documented,
    forward,
    raised_by,
    scheduler_of,
)
from step_programs import Pair, fitted

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
    "pp2 vpp2 dp2, aligned": (4, {**VIRTUAL, "align": True} | GATHERS),
}
ALWAYS = ("dp2, gathers", "pp2")
NAMES = ("alice", "bob")


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


def benches(**options: Any) -> list[Bench]:
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
        Bench(step={"forward": using(name)}, built=(model, scheduler, replica))
        for name, (model, scheduler) in zip(NAMES, models, strict=True)
    ]


def using(name: str) -> Any:
    """Return a forward that uses an adapter."""

    def adapted(chunk: Any, microbatch: Any) -> Any:
        use([chunk], name)
        return forward(chunk, microbatch)

    return adapted


#: A step that is dropped, whose gradients are in nobody's next step, and one that is finished, in
#: another number of microbatches each time, because DDP learns when to reduce from the first one.
STEPS: list[list[Any]] = [
    [
        *[("begin",), ("microbatch", sizes), ("abort",), ("begin",)],
        *[("microbatch", sizes), ("microbatch", (2, 2), {"last": last}), ("finish",)],
    ]
    for sizes, last in (((1, 1), False), ((2, 2), False), ((1, 1), True))
]


def in_turn(options: dict[str, Any]) -> None:
    """Runs on a rank: the adapters' steps, against each adapter's own model, stepped at once."""
    pairs = []
    for index, (name, bench) in enumerate(zip(NAMES, benches(**options), strict=True)):
        scaled = {"loss_scale": options["loss_scale"] * 2**index} if "loss_scale" in options else {}
        alone = {"adapted": {"adapters": (name,), "alike": True}, **options, **scaled}
        pairs.append((name, Pair("megatron", alone, split=bench)))
    for number, program in enumerate(STEPS):
        for name, pair in pairs[:: -1 if number % 2 else 1]:
            train_only(pair.split.model.chunks, name)
            pair.run(fitted(program, options))
            both = [values_of(each.model.chunks, name) for each in (pair.split, pair.whole)]
            assert torch.equal(*both), (name, number)


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_each_adapters_steps_are_those_of_its_own_run(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    megatron_ranks(ranks, in_turn, options, timeout_s=300)


@on_ranks(1)
def test_a_step_beside_an_open_one_over_the_same_modules_is_refused() -> None:
    alice, bob = benches()
    train_only(alice.model.chunks, "alice")
    step_id = alice.begin()
    error = raised_by(bob.begin)
    assert isinstance(error, RuntimeError)
    assert "a TrainStep is open for another DDP over the same modules" in str(error)
    alice.step.microbatch(step_id, alice.batch(1))
    assert alice.step.finish(step_id).updated
    train_only(bob.model.chunks, "bob")
    assert bob.run([bob.batch(1)]).updated


@on_ranks(1)
def test_the_documented_adapters_train() -> None:
    from megatron.core.optimizer import OptimizerConfig

    patch()

    def prepare(module: Any) -> None:
        Lora(adapters=NAMES)(module)
        train_only([module])

    base = tiny.build(before_ddp=prepare, with_optimizer=False)
    (bare,) = base.chunks
    names: dict[str, Any] = {}
    exec(*documented("adapters"), names)
    for name in NAMES:
        settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        parts = [bare.module], base.config, bare.ddp_config, settings, using(name)
        step = names["step_of"](name, *parts)
        step_id = step.begin(TokenLoss(), micro_batch_size=ROWS)
        step.microbatch(step_id, data(1, 2 * ROWS, 0))
        result = step.finish(step_id)
        assert result.updated
        assert result.grad_norm > 0
