"""A step is begun, fed and ended once per id; anything else is an error that changes nothing."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from scenario import Bench, SequenceLoss, TokenLoss, build, cut, raised_by

import megatron_idempotent
from megatron_idempotent import WindowAborted

pytestmark = pytest.mark.full


def _raised(error, call, *args, **kwargs):
    raised = raised_by(call, *args, **kwargs)
    assert isinstance(raised, error), raised
    return str(raised)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(2)
def test_calls_out_of_order_are_errors_that_name_the_open_step(engine: str) -> None:
    """Every call that has no open step, or has one already."""
    bench = Bench(engine)
    step, batch = bench.step, bench.batch(2)

    step.abort()
    assert "no step is" in _raised(RuntimeError, step.microbatch, "step-0", batch)
    assert "no step is" in _raised(RuntimeError, step.finish, "step-0")
    first = bench.begin()
    assert step.open_step_id == first
    assert repr(first) in _raised(RuntimeError, bench.begin)
    assert repr(first) in _raised(RuntimeError, step.microbatch, "other", batch)
    assert repr(first) in _raised(RuntimeError, step.abort, "other")
    step.abort(first)
    assert step.open_step_id is None
    assert "aborted" in _raised(RuntimeError, step.finish, first)
    assert "aborted" in _raised(RuntimeError, bench.begin, step_id=first)
    second = bench.begin()
    assert second != first
    step.microbatch(second, batch, last=True)
    assert "last batch" in _raised(RuntimeError, step.microbatch, second, batch)
    step.finish(second)
    assert "was finished" in _raised(RuntimeError, step.microbatch, second, batch)
    assert "all ranks have updated" in _raised(RuntimeError, step.abort, second)
    step.abort()


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(2)
def test_what_is_sent_again_changes_nothing(engine: str) -> None:
    """The same ids again, and the numbers of a run in which nothing was
    repeated."""

    def run(times: int):
        bench = Bench(engine, overlap_param_gather=True)
        step, results = bench.step, []
        for number in range(2):
            name = f"outer {number}"
            pieces = list(cut(bench.batch(4, seed=number), [1, 3]))
            for _ in range(times):
                assert bench.begin(step_id=name) == name
            for index, piece in enumerate(pieces):
                first = step.microbatch(name, piece, microbatch_id=f"piece {index}")
                for _ in range(times - 1):
                    assert bench.begin(step_id=name) == name
                    again = step.microbatch(name, piece, microbatch_id=f"piece {index}")
                    assert again is first
            result = step.finish(name)
            for _ in range(times - 1):
                assert step.finish(name) is result
                assert bench.begin(step_id=name) == name
            results.append(result)
        assert step.open_step_id is None
        bench.begin(step_id="third")
        assert "(2, 1)" in _raised(RuntimeError, bench.begin, micro_batch_size=1, step_id="third")
        step.abort()
        return results, bench.parameters()

    once, twice = run(1), run(3)
    assert once[0] == twice[0]
    assert torch.equal(once[1], twice[1])


def differently(engine: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Runs on a rank: rank 1 begins or ends a step otherwise; what all ranks are told of it, and
    what it says."""

    class OtherMetrics(TokenLoss):
        normalizers: ClassVar = {"rows": "tokens"}

    bench = Bench(engine, **options)
    batch, before, odd = bench.batch(2), bench.digest(), bench.rank == 1
    ready: dict[str, Any] = {"micro_batch_size": None, "max_tokens_per_microbatch": 96 + odd}

    def divisor(counts: Any) -> float:
        return -1.0 if odd else 1.0

    rows: list[tuple[dict[str, Any], str]] = [
        ({"loss": (SequenceLoss if odd else TokenLoss)()}, "kind='sequence' where rank 0 has 'tok"),
        ({"global_batch_size": 8 + odd}, "global_batch_size=9 where rank 0 has 8"),
        (
            {"loss": (OtherMetrics if odd else TokenLoss)()},
            "normalizers={'rows': 'tokens'} where rank 0 has {",
        ),
        (ready, "max_tokens_per_microbatch=97 where rank 0 has 96"),
    ]
    rows += [({**more, "last": True}, text) for more, text in rows[:3]]
    rows += [
        ({"finish": {"lr": 1.0 + odd}}, "finish(lr)=2.0 where rank 0 has 1.0"),
        ({"finish": {"divisor": lambda _: 1.0 + odd}}, "divisor=2.0 where rank 0 has 1.0"),
        ({"finish": {"divisor": divisor}}, "returned -1.0: return a finite number from 0 on"),
    ]
    found = []
    for more, text in rows:
        error = raised_by(bench.run, [[batch]] if more is ready else [batch], **more)
        assert isinstance(error, WindowAborted), (text, error)
        assert "abort() the step" in str(error)
        found.append((error.failures[1], text))
        bench.step.abort()
        assert bench.digest() == before
    # Sizes of microbatches, and how many there are, are each replica's own.
    sizes = {"micro_batch_size": 1 if odd and bench.replica else 2, "rank_batch_size": 4}
    assert bench.run([batch], **sizes).updated
    ways: dict[str, Any] = {"non_finite": "skip" if odd else "update"}
    texts = ["non_finite='skip' where rank 0 has 'update'"]
    if engine == "megatron":
        ways["order_stable"] = odd
        texts.append("order_stable=True where rank 0 has False")
    other = Bench(engine, step=ways, **options)
    error = raised_by(other.run, [batch])
    return [*found, *((error.failures[1], text) for text in texts)]


LAYOUTS = {"dp2": ("megatron", {}), "tp2": ("megatron", {"tp": 2}), "fsdp": ("fsdp", {})}


@pytest.mark.parametrize(("engine", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_arguments_that_differ_are_named_with_their_ranks(megatron_ranks, engine, options):
    first, *more = megatron_ranks(2, differently, engine, options)
    assert all(other == first for other in more)
    for told, text in first:
        assert text in told


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(2)
def test_a_step_is_told_its_learning_rate_and_batch_size_when_it_ends(engine: str) -> None:
    """Batch size, divisor and learning rate are given to finish(), as Tinker's
    client does.

    Against a step whose schedule has that rate. What is given twice is the same.
    """
    found = []
    for lr in (1e-3, 2e-3):
        bench = Bench(engine)
        before = bench.parameters()
        step_id = bench.begin(global_batch_size=None)
        bench.step.microbatch(step_id, bench.batch(1))
        for wrong in (-1.0, float("nan"), "1e-3", True):
            assert "as lr" in str(raised_by(bench.step.finish, step_id, lr=wrong))
        if engine == "megatron":
            assert "no global_batch_size" in str(raised_by(bench.step.finish, step_id, lr=lr))
        result = bench.step.finish(step_id, lr=lr, global_batch_size=8)
        assert result.lr == result.rows[0]["lr"] == lr
        found.append((bench.parameters() - before).double())
    # Adam's first update is the learning rate times a number near 1 that does not depend on it,
    # plus decay by the rate: two roundings of a parameter, each of half a unit in its last place.
    bound = 3 * 2**-24 * bench.parameters().double().abs().max() * 2
    assert (found[0] * 2 - found[1]).abs().max() <= bound
    assert found[0].abs().max() > 5e-4
    step_id = bench.begin(divisor=2.0)
    bench.step.microbatch(step_id, bench.batch(1))
    for name, value in (("divisor", 3.0), ("global_batch_size", 4)):
        told = raised_by(bench.step.finish, step_id, **{name: value})
        assert f"finish() got {name}={value!r}, and begin()" in str(told)
    assert bench.step.finish(step_id, divisor=2.0).updated


def messages(lengths: list[int]) -> list[tuple[str, int]]:
    """Runs on a rank: what is heard of ranks that each bring so many rows of metrics."""
    from megatron_idempotent.step.status import RankStatus, all_gather_status

    rank = dist.get_rank()
    rows = tuple({"loss": float(row), f"of {rank}": 1.0} for row in range(lengths[rank]))
    said = all_gather_status(
        RankStatus(phase="finish", step_id=f"step of {rank}", updates=0, rows=rows), 20.0
    )
    assert all(say.rows[-1]["loss"] == len(say.rows) - 1 for say in said if say.rows)
    return [(say.step_id, len(say.rows)) for say in said]


def test_what_ranks_say_arrives_whole_whatever_its_length(megatron_ranks):
    for lengths in ([0, 1], [2000, 0], [2000, 3000]):
        want = [(f"step of {rank}", length) for rank, length in enumerate(lengths)]
        assert megatron_ranks(2, messages, lengths) == [want] * 2


def all_fail() -> tuple[str, str]:
    """Runs on a rank: all losses fail; the first lines of the error, and of its pickled copy."""

    class Loss(TokenLoss):
        def __call__(self, output, microbatch):
            raise LookupError(f"bad sample of rank {bench.rank}\nin the file")

    bench = Bench(pp=2, layers_per_stage=1, loss=Loss())
    told = raised_by(bench.run, [bench.batch(1)], last=True)
    copy = pickle.loads(pickle.dumps(told))
    bench.step.abort()
    return str(told).splitlines()[0], str(copy).splitlines()[0]


def test_an_aborted_window_begins_with_the_ranks_own_error(megatron_ranks):
    found = megatron_ranks(4, all_fail)
    for rank in (2, 3):  # the last stages, which have the loss
        assert found[rank] == (f"rank {rank}: loss: LookupError: bad sample of rank {rank}",) * 2
    assert found[0][0].startswith("rank 2: loss: LookupError")


@on_ranks(2)
def test_what_it_stands_on_is_asked_for_before_any_collective() -> None:
    """No patches, no finalize function, no optimizer, a schedule called
    directly."""

    def apply(*excluded: str) -> None:
        megatron_idempotent.revert()
        megatron_idempotent.apply(exclude=excluded)

    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model, _, _ = build(experts=4, config_overrides=bias)
    megatron_idempotent.revert()
    told = _raised(RuntimeError, megatron_idempotent.TrainStep, model.chunks, model.optimizer)
    assert "aux-loss-scale-left-set (disabled: " in told
    assert "forward-only-counts-tokens (disabled: " in told
    assert "counts for its expert bias" in told
    assert "megatron_idempotent.apply(), and exclude none of them" in told
    apply("forward-only-counts-tokens")
    told = _raised(RuntimeError, megatron_idempotent.TrainStep, model.chunks, model.optimizer)
    assert "forward-only-counts-tokens (disabled: " in told
    assert "aux-loss-scale-left-set" not in told
    bench = Bench()
    step, model = bench.step, bench.model
    apply("forward-only-counts-tokens")
    reference = megatron_idempotent.TrainStep(model.chunks)  # this model has no expert bias
    megatron_idempotent.apply()

    name = reference.begin(bench.loss, micro_batch_size=2, global_batch_size=8)
    assert "without an optimizer" in _raised(RuntimeError, reference.finish, name)
    reference.abort()

    name = bench.begin()
    step.microbatch(name, bench.batch(2))
    gradients = model.gradients()
    assert gradients.any()
    bench.step = megatron_idempotent.TrainStep(model.chunks, model.optimizer)
    assert "is open for these chunks" in _raised(RuntimeError, bench.begin)
    assert "is open for these chunks" in _raised(
        RuntimeError, model.forward_backward, 1, data_seed=1, zero_first=False
    )
    assert torch.equal(model.gradients(), gradients)
    finalize = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = None
    assert "wire_train_config" in _raised(RuntimeError, step.finish, name)
    model.config.finalize_model_grads_func = finalize
    assert step.finish(name).updated
    # A config function that is None is None again, and the others are the caller's.
    assert model.config.finalize_model_grads_func is finalize
    assert model.config.grad_sync_func is None
    assert model.config.no_sync_func == model.chunks[0].no_sync
    model.forward_backward(1, data_seed=1)


SHARED = {"tp": 2, "sequence_parallel": True}


def refused_without(patch_id: str, layout: dict[str, Any], per_token: bool) -> tuple[bool, bool]:
    """Runs on a rank; returns whether this Megatron has the hazard, and whether a step refuses."""

    megatron_idempotent.revert()
    rows = {row.id: row.status for row in megatron_idempotent.apply(exclude=[patch_id])}
    overrides = {"calculate_per_token_loss": per_token}
    model, _, _ = build(experts=4, config_overrides=overrides, **layout)
    megatron_idempotent.revert()
    megatron_idempotent.apply(exclude=[patch_id])
    told = raised_by(megatron_idempotent.TrainStep, model.chunks, model.optimizer)
    refused = f"{patch_id} (disabled: " in str(told)
    assert refused == (told is not None), told
    return rows[patch_id] == "disabled", refused


@pytest.mark.parametrize(
    ("layout", "per_token"), [(SHARED, True), (SHARED, False), ({}, True)], ids=str
)
def test_auxiliary_losses_of_shared_sequences_want_their_patch(megatron_ranks, layout, per_token):
    """Their weight is wrong per token alone, and only where ranks share a sequence."""
    arguments = ("aux-loss-counts-own-tokens", layout, per_token)
    for there, refused in megatron_ranks(2, refused_without, *arguments):
        assert refused == (there and per_token and bool(layout))
