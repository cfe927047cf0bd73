"""Steps of several adapters over one base model, open at the same time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora import Lora, use
from ranks import on_ranks, tiered
from scenario import ROWS, TokenLoss, documented, forward, raised_by
from tenant_bench import alone, biases, logged, only, own, parameters, rows_of, step_of, tenants

import megatron_idempotent
from megatron_idempotent import WindowAborted
from megatron_idempotent.proof.cpu import tiny

GATHERS = {"overlap_param_gather": True}
SMALL = {"ddp_overrides": {"bucket_size": 600}}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.1,
}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2, gathers": (2, GATHERS | SMALL),
    "dp2, no overlap": (2, {"overlap_grad_reduce": False}),
    "dp2, fp16": (2, {"dtype": "fp16", "loss_scale": 256.0}),
    "dp2, experts": (2, {"experts": 4, "config_overrides": DROPOUT | BIAS} | GATHERS),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2 dp2, gathers": (4, {"pp": 2} | GATHERS),
    "pp2 vpp2 dp2, aligned": (
        4,
        {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True} | GATHERS,
    ),
}
ALWAYS = ("dp2, gathers", "dp2, experts", "pp2")


class Interrupted:
    """A token loss that raises in its second microbatch."""

    def __init__(self) -> None:
        self._loss = TokenLoss()
        self.kind, self.normalizers = self._loss.kind, self._loss.normalizers
        self.calls = 0

    def __call__(self, output, microbatch):
        self.calls += 1
        if self.calls == 2:
            raise ValueError("a bad sample")
        return self._loss(output, microbatch)


def interleaved(options: dict[str, Any]) -> dict[str, list[list[bool]]]:
    """Runs on a rank: two tenants' steps in turn, each set beside its own run."""
    options = {"config_overrides": DROPOUT, **options}
    # Another number in each step, because DDP learns when to reduce from the first one.
    sizes = ([2, 2], [4, 2], [2, 2]) if options.get("vpp") else ([1, 2], [2, 2], [1, 1])
    names = ("alice", "bob")
    alice, bob = pair = tenants(names, **options)
    before = torch.get_rng_state(), biases(alice.model.chunks)
    assert bool(before[1]) is bool(options.get("experts"))
    found: dict[str, list[list[Any]]] = {name: [] for name in names}
    logged()
    logs = []

    def note(*those: Any) -> None:
        for each in those:
            with each.step.reading() as chunks:
                kept = biases(chunks)
            found[each.name][-1] += [parameters(each), *kept]
        logs.append(logged())

    def finish(tenant: Any) -> None:
        found[tenant.name].append([torch.tensor(tenant.finish().grad_norm)])

    # In turn; the other way round on the second replica.
    first, second = (pair, pair[::-1])[alice.replica % 2], pair
    batches = {each.name: each.batches(1, sizes[0]) for each in pair}
    for each in pair:
        each.begin()
    for index in (0, 1):
        for each in first:
            each.microbatch(batches[each.name][index])
    for each in second:
        finish(each)
    note(*pair)

    # One of them is aborted, then fails, while the other one goes on.
    batches = {each.name: each.batches(2, sizes[1]) for each in pair}
    alice.begin()
    alice.microbatch(batches["alice"][0])
    bob.begin()
    alice.microbatch(batches["alice"][1])
    bob.microbatch(batches["bob"][0])
    alice.step.abort()
    alice.begin(Interrupted())
    bob.microbatch(batches["bob"][1], last=True)
    assert raised_by(alice.microbatch, batches["alice"][1]) is not None
    alice.step.abort()
    alice.begin()
    alice.microbatch(batches["alice"][0])
    finish(bob)
    alice.microbatch(batches["alice"][1], last=True)
    finish(alice)
    note(*pair)

    batches = {each.name: each.batches(3, sizes[2]) for each in pair}
    for each in pair:
        each.begin()
    for index in (0, 1):
        for each in pair:
            each.microbatch(batches[each.name][index], last=index == 1)
    for each in pair[::-1]:
        finish(each)
    note(*pair)

    states = [torch.equal(torch.get_rng_state(), before[0])]
    states += [
        torch.equal(*both) for both in zip(biases(alice.model.chunks), before[1], strict=True)
    ]
    same = {"process": [states]}
    wanted_logs: list[Any] = []
    for place, name in enumerate(names):
        scaled = {**options}
        if scaled.get("loss_scale"):
            scaled["loss_scale"] *= 2**place
        want = alone(name, list(map(sum, sizes)), **scaled)
        assert float(want[0][0]) > 0
        same[name] = [
            [torch.equal(a, b) for a, b in zip(mine, those[: len(mine)], strict=True)]
            for mine, those in zip(found[name], want, strict=True)
        ]
        wanted_logs.append([each[len(found[name][0]) :] for each in want])
    same["logs"] = [
        [torch.equal(a + b, total) for a, b, total in zip(one, other, both, strict=True)]
        for one, other, both in zip(*wanted_logs, logs, strict=True)
    ]
    return same


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_steps_in_turn_are_each_its_own_run(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    for found in megatron_ranks(ranks, interleaved, options, timeout_s=300):
        assert all(all(map(all, each)) for each in found.values()), found


@on_ranks(2)
def test_tenants_are_apart() -> None:
    alice, bob = pair = tenants(("alice", "bob"), overlap_grad_reduce=False)
    for each in pair:
        each.scheduler.step(increment=8)  # the first rate is 0
    (chunk,) = alice.model.chunks
    module = chunk.module

    def beside(*names: str) -> Any:
        def adapted(chunk: Any, microbatch: Any) -> Any:
            use([chunk], *names)
            return forward(chunk, microbatch)

        return adapted

    # A forward that uses both adapters trains its own one, whichever are trained outside.
    alice.step = step_of(
        alice.model, alice.scheduler, "alice", forward=beside("alice", "bob"), undo=True
    )
    only([module], "bob")
    for each in pair:
        each.begin()
    bob.microbatch(bob.batches(1, [1])[0])
    before = bob.gradients().clone()
    alice.microbatch(alice.batches(1, [1])[0])
    assert alice.gradients().any()
    assert before.any()
    assert torch.equal(bob.gradients(), before)
    assert not any(parameter.requires_grad for parameter in own(module, "alice"))
    assert all(parameter.requires_grad for parameter in own(module, "bob"))

    # An update that is undone is not the other one's.
    one = getattr(alice.model.optimizer, "chained_optimizers", [alice.model.optimizer])[0]
    update = one.optimizer.step

    def broken(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        raise ValueError("out of memory")

    begun, bobs = parameters(alice), parameters(bob)
    one.optimizer.step = broken
    assert isinstance(raised_by(alice.finish), WindowAborted)
    one.optimizer.step = update
    assert bob.finish().updated
    updated = parameters(bob)
    assert not torch.equal(updated, bobs)
    alice.step.abort()
    assert torch.equal(parameters(alice), begun)
    assert torch.equal(parameters(bob), updated)

    # Ranks that are in steps of different tenants are told.
    for each in pair:
        each.begin()
    mine = pair[torch.distributed.get_rank() % 2]
    told = raised_by(mine.finish)
    assert isinstance(told, WindowAborted)
    assert "is in step 'bob: step-1'" in str(told)
    for each in pair:
        each.step.abort()
    for each in pair:
        each.begin()
        each.microbatch(each.batches(2, [1])[0])
    assert all(each.finish().updated for each in pair)


@on_ranks(1)
def test_steps_that_would_disturb_each_other_are_refused() -> None:
    """Errors of steps that would disturb each other; the open one goes on."""
    from megatron.core.distributed import DistributedDataParallel

    alice, bob = tenants(("alice", "bob"))
    alice.begin()
    named = {"no name": None, "same name": "alice", "another": "bob"}
    steps = {
        text: step_of(bob.model, bob.scheduler, "bob", tenant=name) for text, name in named.items()
    }
    steps["same chunks"] = step_of(alice.model, alice.scheduler, "carol")
    told = {}
    for text, step in steps.items():
        bob.step = step
        told[text] = str(raised_by(bob.begin))
    steps["another"].abort()
    alice.microbatch(alice.batches(1, [1])[0])
    assert alice.finish().updated

    bob.step = steps["no name"]
    bob.begin()
    told["beside one without"] = str(raised_by(alice.begin))
    bob.step.abort()
    for name in ("", 3):
        told[repr(name)] = str(raised_by(step_of, alice.model, None, "", tenant=name))

    (chunk,) = alice.model.chunks
    only([chunk.module], "alice", "bob")
    DistributedDataParallel(alice.model.config, chunk.ddp_config, chunk.module)
    told["built later"] = str(raised_by(alice.begin))
    assert "make both with a name" in told["no name"]
    assert "make both with a name" in told["beside one without"]
    assert "tenant 'alice' is open" in told["same name"]
    assert "give each a DDP and a TrainStep(…, tenant=…)" in told["same chunks"]
    assert told["another"] == "None"
    assert "got ''" in told["''"]
    assert "got 3" in told["3"]
    assert "in a DDP that was built later" in told["built later"]


@on_ranks(1)
def test_the_documented_tenants_train() -> None:
    """Two tenants' steps by the documented function."""
    from megatron.core.optimizer import OptimizerConfig

    megatron_idempotent.apply()

    def prepare(module: Any) -> None:
        Lora(adapters=("alice", "bob"))(module)
        only([module])

    base = tiny.build(before_ddp=prepare, with_optimizer=False)
    (bare,) = base.chunks
    names: dict[str, Any] = {}
    exec(*documented("adapters"), names)

    def made(name: str) -> Any:
        def adapted(chunk: Any, microbatch: Any) -> Any:
            use([chunk], name)
            return forward(chunk, microbatch)

        settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        parts = [bare.module], base.config, bare.ddp_config, settings, adapted
        return names["step_of"](name, *parts)

    steps = {name: made(name) for name in ("alice", "bob")}
    ids = {name: each.begin(TokenLoss(), micro_batch_size=ROWS) for name, each in steps.items()}
    for name, step in steps.items():
        step.microbatch(ids[name], rows_of(name, 1, 2, 0))
    results = [step.finish(ids[name]) for name, step in steps.items()]
    assert all(result.updated and result.grad_norm > 0 for result in results)
