"""After a failed step on FSDP2, the next one is what it is where nothing has ever failed."""

import gc
import time
import weakref

import pytest
import torch
from fsdp_bench import CLIP, Trip, Tripped, bench, same
from ranks import on_ranks
from scenario import TokenLoss, cut
from torch.distributed.fsdp import FSDPModule

from megatron_idempotent import SessionPoisoned, WindowAborted

PIECES = [1, 1]


def some_of(names):
    """The first and the last place of each kind, such as all gathers, or forwards of layers."""
    kinds = [name.partition(" of ")[0] for name in names]
    ends = {place for kind in kinds for place in (kinds.index(kind), _last_index(kinds, kind))}
    return sorted(place + 1 for place in ends)


def _last_index(values, value):
    return len(values) - 1 - values[::-1].index(value)


def steps_with_failures(layout, last, every=True):
    """Runs on a rank: as many steps as a step has places, or some; all ranks leave each step at one
    of     the places, abort it and run it again.

    Returns the names of all places, and those after which something was different from a run
    without failures.
    """
    ranks = torch.distributed.get_world_size()

    def setting():
        clip = None if layout == "tensor parallel" else CLIP
        made = bench(layout, undo=True, clip_grad=clip)
        return made, Trip(*made.parts), list(cut(made.batch(2), PIECES))

    made, trip, pieces = setting()
    states, results, places = [made.state()], [], [0]
    while len(results) < len(places):
        trip.set(0)
        results.append(made.run(pieces, last=last))
        states.append(made.state())
        names = list(trip.passed)
        places = list(range(1, len(names) + 1)) if every else some_of(names)
    differing = []
    made, trip, pieces = setting()
    for number, place in enumerate(places, start=1):
        name = names[place - 1]
        trip.set(place)
        with pytest.raises(WindowAborted) as stopped:
            made.run(pieces, last=last)
        assert isinstance(stopped.value.__cause__, Tripped)
        assert sorted(stopped.value.failures) == list(range(ranks))
        trip.set(0)
        made.step.abort()
        if not same(made.state(), states[number - 1]):
            differing.append(f"{name}, aborted")
        if any(parameter.grad is not None for parameter in made.module.parameters()):
            differing.append(f"{name}, gradients")
        result = made.run(pieces, last=last)
        wanted = results[number - 1]
        if not same(made.state(), states[number]) or result.metrics != wanted.metrics:
            differing.append(name)
        if result.grad_norm != wanted.grad_norm or trip.passed != names:
            differing.append(f"{name}, norm or places")
    return names, differing


def test_all_ranks_leave_at_places_of_each_kind(megatron_ranks):
    check_places(megatron_ranks(2, steps_with_failures, "shard", True, every=False))


def with_our_reset(*args, **kwargs):
    """Runs on a rank: the same as before torch 2.13, which brings a reset of its own."""
    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    return steps_with_failures(*args, **kwargs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["shard", "replicate and shard"])
def test_our_own_reset_does_what_torchs_does(megatron_ranks, layout):
    ranks = 4 if layout == "replicate and shard" else 2
    check_places(megatron_ranks(ranks, with_our_reset, layout, True, every=False))


@pytest.mark.exhaustive
@pytest.mark.parametrize("last", [False, True])
def test_all_ranks_leave_at_each_place(megatron_ranks, last):
    answers = megatron_ranks(2, steps_with_failures, "shard", last, timeout_s=120)
    check_places(answers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["replicate and shard", "tensor parallel"])
def test_four_ranks_leave_at_each_place(megatron_ranks, layout):
    check_places(megatron_ranks(4, steps_with_failures, layout, True, timeout_s=300))


def check_places(answers):
    for names, differing in answers:
        assert names.count("gather") == 10
        assert names.count("scatter") == 3
        assert {"backward of blocks.0.up", "before the update", "after the schedule"} < set(names)
        assert not differing


@pytest.mark.full
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("where", ["forward before", "forward after", "loss itself"])
@on_ranks(2)
def test_one_rank_fails_outside_of_the_model(where, last):
    """Rank 0 fails outside of the model, in the second of three microbatches."""
    calls = {"forward": 0, "loss": 0}
    armed, outputs = False, []

    def passing(name, at):
        calls[name] += at == "before" if name == "forward" else 1
        if armed and made.rank == 0 and where == f"{name} {at}" and calls[name] == 3:
            raise Tripped(where)

    def forward(model, microbatch):
        passing("forward", "before")
        output = model(microbatch["input_ids"])
        outputs.append(weakref.ref(output))
        passing("forward", "after")
        return output

    class Loss(TokenLoss):
        def __call__(self, output, microbatch):
            passing("loss", "itself")
            return super().__call__(output, microbatch)

    made = bench(loss=Loss(), forward=forward)
    pieces = list(cut(made.batch(4), [1, 3]))
    made.run(pieces, last=last)
    want = made.state()
    made = bench(loss=Loss(), forward=forward)
    before = made.state()
    calls, armed = {"forward": 0, "loss": 0}, True
    with pytest.raises(WindowAborted) as stopped:
        made.run(pieces, last=last)
    assert list(stopped.value.failures) == [0]
    assert isinstance(stopped.value.__cause__, Tripped) == (made.rank == 0)
    assert calls["forward"] >= 4  # the rest of the call was run, for the others
    with pytest.raises(RuntimeError, match="has failed"):
        made.step.finish(made.step.open_step_id)
    armed = False
    made.step.abort()
    gc.collect()
    assert not any(output() is not None for output in outputs)  # the error holds none of them
    aborted = same(made.state(), before)
    made.run(pieces, last=last)
    assert aborted
    assert same(made.state(), want)


@pytest.mark.parametrize("interrupt", [False, True])
@on_ranks(2)
def test_one_rank_fails_inside_of_the_model(interrupt):
    """Rank 0 leaves a layer, and the other waits for it in a collective."""
    made = bench(deadline_s=4.0)
    trip, begun = Trip(*made.parts), time.monotonic()
    if made.rank == 0:
        trip.set(4, KeyboardInterrupt if interrupt else None)
    error, text = SessionPoisoned, "agree within 4 s" if interrupt else "same place"
    if interrupt and made.rank == 0:
        error, text = KeyboardInterrupt, "forward of blocks.0.norm"
    with pytest.raises(error, match=text):
        made.run([made.batch(1)])
    assert time.monotonic() - begun < 15.0
    made.step.abort()
    with pytest.raises(SessionPoisoned, match="half-way"):
        made.run([made.batch(1)])
    assert all(parameter.grad is None for parameter in made.module.parameters())
