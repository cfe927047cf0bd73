"""A split step on FSDP2: its bits, uneven data, a scaler, and what a program has set or left."""

from __future__ import annotations

import ast
import inspect
import re
import time
from types import SimpleNamespace

import pytest
import torch
from fsdp_bench import CLIP, Counting, Model, Trip, Tripped, bench, build, one_shot, same
from ranks import on_ranks
from scenario import TokenLoss, cut, raised_by, split_step
from torch.distributed.fsdp import fully_shard

from megatron_idempotent import FSDPTrainStep, WindowAborted


@on_ranks(2)
def test_a_step_makes_the_collectives_of_torchs_own_step_at_once():
    """Gathers and reductions of two steps in pieces, and random states after them, with dropout."""
    whole = bench()
    counting, batches = Counting(whole.module), [whole.batch(6, seed=seed) for seed in (1, 2)]
    for batch in batches:
        one_shot(*whole.parts, whole.loss, batch)
    expected = whole.state()
    for last in (False, True):
        made = bench()
        also = Counting(made.module)
        for batch in batches:
            made.run(list(cut(batch, [1, 2, 3])), last=last)
        assert also.counts == counting.counts
        assert same(made.state(), expected)


@on_ranks(2)
def test_a_rank_that_finishes_early_sends_zeros_and_draws_nothing():
    """Rank 1 is done two batches before rank 0."""
    made = bench()
    step_id, mine = made.begin(), (3, 1)[made.rank]
    for piece in list(cut(made.batch(3), [1, 1, 1]))[:mine]:
        made.step.microbatch(step_id, piece)
    random = torch.get_rng_state()
    assert made.step.finish(step_id).microbatches == 4
    assert torch.equal(torch.get_rng_state(), random)
    assert [float(block.forwards) for block in made.module.blocks] == [float(mine)] * 2


@on_ranks(2)
def test_settings_of_the_program_are_put_back():
    made = bench()
    model = made.module
    groups = [m._get_fsdp_state()._fsdp_param_group for m in (model, *model.blocks)]
    context = model._get_fsdp_state()._state_ctx

    def settings():
        return [(g.reduce_grads, g.all_reduce_grads) for g in groups], context.is_last_backward

    model.set_requires_gradient_sync(False)
    model.blocks[0].set_requires_all_reduce(True)
    model.set_is_last_backward(False)
    model.blocks[1].eval()
    before = settings()
    made.run([made.batch(2)])
    assert settings() == before
    for parameter in model.parameters():
        parameter.grad = None
    model.blocks[1].eval()
    made.step.microbatch(made.begin(), made.batch(2))
    assert model.blocks[1].training
    assert context.is_last_backward  # or nothing would wait for the reduction
    made.step.abort()
    assert settings() == before
    assert not model.blocks[1].training


@pytest.mark.parametrize("layout", ["shard", "half precision"])
@on_ranks(2)
def test_begin_drops_what_a_loop_has_left(layout):
    """A step after a loop that was left in the middle of an accumulation."""
    want = bench(layout)
    want.run([want.batch(2)])
    made = bench(layout)
    model, tokens = made.module, made.batch(2)["input_ids"]
    random, trip = torch.get_rng_state(), Trip(*made.parts)
    model.set_requires_gradient_sync(False)
    model(tokens).sum().backward()
    trip.set(10)
    with pytest.raises(Tripped):
        model(tokens).sum().backward()
    trip.set(0)
    torch.set_rng_state(random)
    for block in model.blocks:
        block.forwards.zero_()
    made.run([made.batch(2)])
    assert same(made.state(), want.state())


@pytest.mark.full
@on_ranks(4)
def test_tensor_parallel_ranks_with_different_batches_are_refused():
    """The two ranks of replica 0 are given different numbers of rows."""
    made = bench("tensor parallel", clip_grad=None)
    step_id = made.begin()
    with pytest.raises(WindowAborted, match="data-parallel rank 0 was given"):
        made.step.microbatch(step_id, made.batch(1 if made.rank == 1 else 2))
    made.step.microbatch(step_id, made.batch(2))
    assert made.step.finish(step_id).microbatches == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("shard", 2), pytest.param("tensor parallel", 4, marks=pytest.mark.exhaustive)],
)
@on_ranks("ranks")
def test_a_scaled_step_is_the_step_and_an_overflow_is_none(layout):
    """Three steps with a scaler, with an overflow and two failures between."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def setting(**options):
        made = bench(layout, clip_grad=None if layout == "tensor parallel" else CLIP, **options)
        for block in made.module.blocks:
            block.dropout.p = 0.0
        return made

    def one_step(made, **more):
        result = made.run(list(cut(made.batch(2), [1, 1])), **more)
        return result, (result.grad_norm, made.parameters())

    made = setting()
    want = [one_step(made)[1] for _ in range(3)]
    made = setting(grad_scaler=scaler, undo=True)
    trip, got = Trip(*made.parts), [one_step(made)[1]]
    result, (_, parameters) = one_step(
        made, loss=TokenLoss(torch.inf if made.replica == 0 else 1.0)
    )
    assert (result.updated, result.grad_norm) == (False, None)
    assert "overflowed" in result.skipped
    assert torch.equal(parameters, got[0][1])
    scales = scaler.state_dict()
    assert scales["scale"] == 512.0
    # Where the scaler has looked at gradients and not been updated, and where it has.
    for place in ("before the update", "after the schedule"):
        trip.raise_at(place)
        with pytest.raises(WindowAborted):
            one_step(made)
        made.step.abort()
        assert scaler.state_dict() == scales
    trip.raise_at(None)
    got += [one_step(made)[1] for _ in range(2)]
    assert scaler.get_scale() == 1024.0  # two steps without an overflow, not more
    # Scales are powers of two, by which nothing is rounded.
    for (a, c), (b, d) in zip(got, want, strict=True):
        assert a == b
        assert torch.equal(c, d)


@pytest.mark.full
@on_ranks(2)
def test_a_scaler_that_is_off_changes_nothing():
    """A scaler that is not enabled changes nothing, and can be aborted with."""

    def run(**options):
        made = bench(**options)
        made.begin()
        made.step.abort()
        made.run([made.batch(1)])
        return made.state()

    assert same(run(grad_scaler=torch.amp.GradScaler("cpu", enabled=False)), run())


@on_ranks(2)
def test_parameters_of_a_group_that_differ_are_put_back():
    """One parameter of a group changes its state, and the next one raises
    instead."""
    from megatron_idempotent.step.fsdp_run import groups_of

    want, made = bench(), None
    for _ in range(2):
        want.run([want.batch(4)])
    expected = want.state()
    made = bench()
    made.run([made.batch(4)])
    (group,) = groups_of(made.module.blocks[0]._get_fsdp_state())

    def trip():
        raise Tripped("between")

    group.fsdp_params[1].to_unsharded = trip
    told = raised_by(made.run, [made.batch(4)])
    del group.fsdp_params[1].to_unsharded
    assert isinstance(told, WindowAborted)
    made.step.abort()
    made.run([made.batch(4)])
    assert same(made.state(), expected)


@pytest.mark.full
@on_ranks(2)
def test_a_rank_that_never_sums_norms_is_not_waited_for():
    """One rank raises where the other sums norms, in the group of an equal mesh."""
    first = bench()
    first.run([first.batch(4)])
    made = bench(deadline_s=4.0)
    made.run([made.batch(4)])

    def trip():
        raise Tripped("norm")

    if made.rank == 1:
        made.step._backend._clipped = trip
    start = time.monotonic()
    told = raised_by(made.run, [made.batch(4)])
    assert type(told).__name__ == "SessionPoisoned"
    assert time.monotonic() - start < 20


@on_ranks(2)
def test_an_open_step_refuses_other_training():
    """A forward for training, and another step, while one is open."""
    want = bench()
    want.run([want.batch(2)])
    made = bench()
    tokens, step = made.batch(2)["input_ids"], made.step
    other = FSDPTrainStep(*made.parts)

    def between(_):
        assert "Use step.microbatch" in str(raised_by(made.module, tokens))
        told = raised_by(other.begin, made.loss, global_batch_size=8, micro_batch_size=2)
        assert "another FSDPTrainStep is open" in str(told)
        assert other.open_step_id is None

    split_step(step, made.loss, made.batch(2), [2], between=between)
    made.module(tokens).sum().backward()
    other.begin(made.loss, global_batch_size=8, micro_batch_size=2)
    assert same(made.state()[:1], want.state()[:1])


@on_ranks(2)
def test_bad_arguments_are_errors_that_name_the_remedy():
    made = bench()
    model, optimizer, _ = made.parts
    plain = Model()
    early = torch.optim.SGD(plain.parameters())
    lacking = SimpleNamespace(step=lambda: None, load_state_dict=lambda state: None)

    def refuse(match, *arguments, **more):
        with pytest.raises(ValueError, match=match):
            FSDPTrainStep(*arguments, **more)

    refuse("namespace.* as scheduler, without state_dict", model, optimizer, lacking)
    refuse("Model that is not fully sharded: apply", plain, optimizer)
    ignored = Model()
    fully_shard(ignored, ignored_params=set(ignored.parameters()))
    refuse("fully_shard has sharded no parameter: leave some out", ignored, early)
    fully_shard(plain, ignored_params=set(plain.head.parameters()))
    refuse(r"2 parameters that are not sharded.*'head\.weight'", plain, early)
    plain.head.requires_grad_(False)
    refuse(r"of which 13 parameters are not.*\(128, 16\).*after", plain, early)
    refuse("got a NoneType as optimizer", model, None)
    step_id = made.begin()
    made.step.microbatch(step_id, made.batch(1))
    with torch.no_grad():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    with pytest.raises(RuntimeError, match="15 of the optimizer's parameters are not the model's"):
        made.step.finish(step_id)
    made.step.abort()
    block = model.blocks[0]
    refuse("part of a larger sharded model: pass that", block, torch.optim.SGD(block.parameters()))


@on_ranks(2)
def test_what_this_torch_lacks_of_fsdp2_is_refused_by_name():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    model, optimizer, _ = build()
    to_sharded, context = FSDPParam.to_sharded, model._get_fsdp_state()._state_ctx
    unsharded = FSDPParam.__annotations__.pop("_unsharded_param")
    del FSDPParam.to_sharded, context.is_last_backward
    told = str(raised_by(FSDPTrainStep, model, optimizer))
    FSDPParam.to_sharded, context.is_last_backward = to_sharded, True
    FSDPParam.__annotations__["_unsharded_param"] = unsharded
    lacking = "FSDPStateContext.is_last_backward, FSDPParam.to_sharded, FSDPParam._unsharded_param"
    assert f"that torch {torch.__version__} does not have: {lacking}. Use a torch from 2.8" in told
    FSDPTrainStep(model, optimizer)


def test_each_part_of_fsdp2_that_a_step_uses_is_looked_for():
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    from megatron_idempotent.step import fsdp, fsdp_run

    theirs: set[str] = set()
    for module in (_fsdp_param, _fsdp_param_group, _fsdp_state):
        theirs.update(re.findall(r"self\.(\w+)", inspect.getsource(module)))
    theirs -= {name for kind in (torch.nn.Module, torch.Tensor, tuple, type) for name in dir(kind)}
    used = set()
    for module in (fsdp_run, fsdp):
        attributes = [
            node
            for part in ast.parse(inspect.getsource(module)).body
            # For releases of torch that will not change.
            if getattr(part, "name", None) not in ("reset", "_in_flight")
            for node in ast.walk(part)
            if isinstance(node, ast.Attribute)
        ]
        own = {node.attr for node in attributes if getattr(node.value, "id", None) == "self"}
        used |= theirs & ({node.attr for node in attributes} - own)
    check = ast.walk(ast.parse(inspect.getsource(fsdp_run.check_internals)))
    asked = {node.value for node in check if isinstance(node, ast.Constant)}
    # One is public, the other is used only where it is there.
    assert used - asked <= {"reshard", "manual_backward_finalization_active"}
    assert len(used) > 15
