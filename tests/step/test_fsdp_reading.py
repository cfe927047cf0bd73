"""Log-probs, evaluation and export while a step on FSDP2 is open; other training is refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest


def reading(last):
    """Runs on a rank: log-probs, export and a failed evaluation after every piece."""
    import torch
    from fsdp_bench import Trip, Tripped, build, parameters, same, state, step_of
    from scenario import TokenLoss, data, split_step
    from torch.distributed.tensor import DTensor

    rank = torch.distributed.get_rank()
    batch, loss = data(1, 8, rank), TokenLoss()
    logprobs = []

    def run(between=None):
        parts = build()
        step, trip = step_of(*parts), Trip(*parts)
        for _ in range(2):
            split_step(
                step,
                loss,
                batch,
                [1, 2, 1],
                last=last,
                between=between and (lambda _: between(parts[0], step, trip)),
            )
        if between is not None:
            between(parts[0], step, trip)
        return state(*parts), [parameter.grad.to_local() for parameter in parts[0].parameters()]

    def look(model, step, trip):
        with torch.no_grad():
            model.eval()(batch["input_ids"])  # leaves the root whole
        model.train()
        model.blocks[1].eval()
        modes = [module.training for module in model.modules()]
        with step.reading() as [model]:
            assert not any(module.training for module in model.modules())
            named = dict(model.named_parameters())
            assert all(isinstance(parameter, DTensor) for parameter in named.values())
            whole = parameters(model)
            logprobs.append((model(batch["input_ids"]).sum().item(), whole))
            assert not torch.is_grad_enabled()
            torch.rand(1)
            model.blocks[0].forwards += 1
        assert modes == [module.training for module in model.modules()]
        model.train()
        trip.set(2)
        with pytest.raises(Tripped), step.reading() as [model]:
            model(batch["input_ids"])
        trip.set(0)

    want, got = run(), run(look)
    assert same(want[1], got[1])
    # Between two updates all of them see the same parameters, and after one others.
    values = [value for value, _ in logprobs]
    assert len(set(values[:3])) == len(set(values[3:6])) == 1
    assert len({values[0], values[3], values[6]}) == 3
    assert torch.equal(logprobs[6][1], want[0][0])
    return same(want[0], got[0])


@pytest.mark.parametrize("last", [False, True])
def test_reading_disturbs_nothing(megatron_ranks, last):
    assert megatron_ranks(2, reading, last) == [True, True]


def evaluated_outside():
    """Runs on a rank: a program evaluates without reading() before the update; its parameters are
    up to date."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from scenario import TokenLoss, data, split_step

    batch, loss = data(1, 4, torch.distributed.get_rank()), TokenLoss()

    def run(between):
        parts = build()
        step = step_of(*parts)
        for _ in range(3):
            look = between and between(parts[0])
            split_step(step, loss, batch, [1, 1], last=True, between=look)
        return state(*parts)

    def evaluation(model):
        def evaluate(_):
            random = torch.get_rng_state()
            model.eval()
            with torch.no_grad():
                model(batch["input_ids"])
            torch.set_rng_state(random)

        return evaluate

    return same(run(evaluation), run(None))


def test_an_evaluation_before_the_update_leaves_no_old_parameters(megatron_ranks):
    assert megatron_ranks(2, evaluated_outside) == [True, True]


def accumulated():
    """Runs on a rank: gradients are dropped, as a reset of FSDP2 may one day do, and put back."""
    import torch
    from fsdp_bench import build

    from megatron_idempotent.step.fsdp_run import GradientSnapshot, Shards

    found = []
    for layout in ("shard", "half precision"):
        model = build(layout)[0]
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4, dtype=torch.long)).sum().backward()
        shards = Shards(model)
        kept = GradientSnapshot(shards)
        shards.drop()
        kept.restore()
        shards.reduce()
        found.append(all(parameter.grad is not None for parameter in model.parameters()))
    return found


def test_accumulated_gradients_are_put_back(megatron_ranks):
    assert megatron_ranks(2, accumulated) == [[True, True]] * 2


def forwards_that_are_refused():
    """Runs on a rank: a forward for training, and another step, while one is open."""
    import torch
    from fsdp_bench import build, same, state, step_of
    from scenario import ROWS, TokenLoss, data, split_step

    batch, loss = data(1, 4, torch.distributed.get_rank()), TokenLoss()
    parts = build()
    split_step(step_of(*parts), loss, batch, [1, 1])
    want = state(*parts)
    model, _, _ = parts = build()
    step, other = step_of(*parts), step_of(*parts)

    def between(_):
        with pytest.raises(RuntimeError, match=r"use step\.microbatch|Use step\.microbatch"):
            model(batch["input_ids"])
        with pytest.raises(RuntimeError, match="another FSDPTrainStep is open"):
            other.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
        assert other.open_step_id is None

    split_step(step, loss, batch, [1, 1], between=between)
    model(batch["input_ids"]).sum().backward()
    other.begin(loss, global_batch_size=8, micro_batch_size=ROWS)
    return same(state(*parts)[:1], want[:1])


def test_an_open_step_refuses_other_training(megatron_ranks):
    assert megatron_ranks(2, forwards_that_are_refused) == [True, True]


def bad_arguments():
    """Runs on a rank: what the constructor says no to, and weights that were swapped under a
    step."""
    import torch
    from fsdp_bench import Model, build, step_of
    from scenario import ROWS, TokenLoss, data
    from torch.distributed.fsdp import fully_shard

    from megatron_idempotent import FSDPTrainStep

    model, optimizer, scheduler = build()
    plain = Model()
    lacking = SimpleNamespace(step=lambda: None, load_state_dict=lambda state: None)
    with pytest.raises(ValueError, match=r"SimpleNamespace as scheduler, without state_dict\(\)"):
        FSDPTrainStep(model, optimizer, lacking)
    with pytest.raises(ValueError, match="Model that is not fully sharded: apply"):
        FSDPTrainStep(plain, optimizer)
    early = torch.optim.SGD(plain.parameters())
    partly = set(plain.head.parameters())
    fully_shard(plain, ignored_params=partly)
    with pytest.raises(ValueError, match=r"2 parameters that are not sharded.*'head\.weight'"):
        FSDPTrainStep(plain, early)
    plain.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"of which 13 parameters are not.*\(128, 16\).*after"):
        FSDPTrainStep(plain, early)
    with pytest.raises(ValueError, match="got a NoneType as optimizer"):
        FSDPTrainStep(model, None)
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match="clip_grad must be positive or None, got"):
            FSDPTrainStep(model, optimizer, clip_grad=wrong)
    step = step_of(model, optimizer, scheduler)
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, data(1, 2, torch.distributed.get_rank()))
    with torch.no_grad():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    with pytest.raises(RuntimeError, match="15 of the optimizer's parameters are not the model's"):
        step.finish(step_id)
    step.abort()
    with pytest.raises(ValueError, match="part of a larger sharded model: pass that"):
        FSDPTrainStep(model.blocks[0], torch.optim.SGD(model.blocks[0].parameters()))


def test_bad_arguments_are_errors_that_name_the_remedy(megatron_ranks):
    megatron_ranks(2, bad_arguments)


def test_megatron_is_not_imported():
    program = (
        "import sys; from megatron_idempotent import FSDPTrainStep; "
        "print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
