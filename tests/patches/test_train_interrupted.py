"""Whichever way `train()` ends, what it set up is put back and its counts agree."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate

MICROBATCHES = 4
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


class Failure(Exception):
    """Breaks in the middle of training."""


def started(*options: str) -> tuple[Any, Any]:
    """Runs on a rank: upstream's module `training` and a program under the patches."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import program

    megatron_idempotent.apply(strict=True)
    running = program.start(options)
    return importlib.import_module("megatron.training.training"), running


def fails_from(call: Any, number: int) -> Any:
    """`call`, which raises from its call `number` on, counted from 0."""
    calls = iter(range(1 << 30))

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= number:
            raise Failure
        return call(*args, **kwargs)

    return maybe


def break_at(training: Any, running: Any, where: str, iteration: int) -> None:
    """Let `train()` raise in or after the step of `iteration`."""
    if where == "forward":
        running._forward_step = fails_from(running._forward_step, iteration * MICROBATCHES + 1)
    elif where == "optimizer":
        running.optimizer.step = fails_from(running.optimizer.step, iteration)
    elif where == "losses":  # after the scheduler's step, inside train_step
        step = running._forward_step

        def odd_shape(*args: Any) -> Any:
            output, loss_func = step(*args)

            def three(loss_BT: Any) -> Any:
                loss, report = loss_func(loss_BT)
                return loss, {name: value.expand(3) for name, value in report.items()}

            return output, three if len(running.losses) >= iteration * MICROBATCHES else loss_func

        running._forward_step = odd_shape
    else:
        owner = training.ft_integration if where == "on_training_step_end" else training
        setattr(owner, where, fails_from(getattr(owner, where), iteration))


def counts_after(where: str, skipped_step: int | None) -> dict[str, float]:
    """Runs on a rank: what is counted where iteration 2 of 4 was interrupted."""
    training, running = started()
    args = running.args
    step, steps = running.optimizer.step, iter(range(1 << 30))

    def step_or_skip() -> Any:
        return (False, None, None) if next(steps) == skipped_step else step()

    running.optimizer.step = step_or_skip
    break_at(training, running, where, 2)
    with pytest.raises((Failure, ValueError)):
        running.train(4)
    batch = args.global_batch_size
    return {
        "iteration": args.iteration,
        "consumed": args.consumed_train_samples / batch,
        "scheduler": running.scheduler.num_steps / batch,
        "operations": args.num_floating_point_operations_so_far
        / training.num_floating_point_operations(args, batch),
    }


@pytest.mark.parametrize(
    ("where", "completed"),
    [
        ("forward", 2),
        ("optimizer", 2),
        ("losses", 3),
        ("on_training_step_end", 3),
        ("training_log", 3),
        ("post_training_step_callbacks", 3),
        ("checkpoint_and_decide_exit", 3),
    ],
)
def test_after_an_exception_all_counts_tell_the_updates_made(where, completed, megatron_ranks):
    for counts in megatron_ranks(2, counts_after, where, None):
        assert set(counts.values()) == {completed}


@pytest.mark.parametrize("where", ["training_log", "on_training_step_end"])
def test_a_skipped_step_counts_as_an_iteration_but_not_for_the_scheduler(where, megatron_ranks):
    for counts in megatron_ranks(2, counts_after, where, 2):
        assert counts.pop("scheduler") == 2
        assert set(counts.values()) == {3}


def iterations_left_out() -> tuple[int, float]:
    """Runs on a rank: iterations 1 and 2 are left out on request, 3 is interrupted."""
    training, running = started()
    # Upstream counts these from 1 since 0.17; its own dummy step reads batches of another form.
    running.args.iterations_to_skip = [2, 3]
    training.dummy_train_step = lambda data_iterator: None
    break_at(training, running, "optimizer", 1)
    with pytest.raises(Failure):
        running.train(4)
    args = running.args
    return args.iteration, args.consumed_train_samples / args.global_batch_size


def test_iterations_left_out_on_request_are_counted(megatron_ranks):
    assert megatron_ranks(2, iterations_left_out) == [(3, 3)] * 2


def exit_condition() -> tuple[object, int, int]:
    """Runs on a rank: the code that `train()` exits with, its iteration, and the next call's."""
    _, running = started(*OVERLAP)
    running.args.exit_interval = 2
    with pytest.raises(SystemExit) as exit_:
        running.train(4)
    reached = running.args.iteration
    running.args.exit_interval = None
    running.train(0)  # up to the four iterations that were asked for before
    return exit_.value.code, reached, running.args.iteration


def test_an_exit_condition_raises_systemexit_and_the_next_call_goes_on(megatron_ranks):
    assert megatron_ranks(2, exit_condition) == [(0, 2, 4)] * 2


def collector(on_before: bool, interrupted: bool) -> bool:
    """Runs on a rank: whether garbage collection is on after `train()`."""
    training, running = started("--manual-gc")
    if not on_before:
        gc.disable()
    if interrupted:
        break_at(training, running, "forward", 0)
        with pytest.raises(Failure):
            running.train(1)
    else:
        running.train(1)
    return gc.isenabled()


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("on_before", [False, True])
def test_garbage_collection_is_what_it_was(on_before, interrupted, megatron_ranks):
    assert megatron_ranks(1, collector, on_before, interrupted) == [on_before]


def own_step_survives() -> bool:
    """Runs on a rank: a call that returns, over an optimizer whose `step` the caller has
    replaced."""
    _, running = started()
    # Not as an option, which makes the optimizer capturable; and never capture: there is no CUDA.
    running.args.optimizer_cuda_graph, running.args.cuda_graph_warmup_steps = True, 100
    step = running.optimizer.step

    def own() -> Any:
        return step()

    running.optimizer.step = own
    running.train(1)
    return running.optimizer.step is own


def test_an_optimizer_step_of_the_callers_own_survives(megatron_ranks):
    assert megatron_ranks(1, own_step_survives) == [True]


def first_step_skipped(*options: str) -> bytes:
    """Runs on a rank: the first of three steps is skipped, weights are compared in every
    iteration."""
    _, running = started("--check-weight-hash-across-dp-replicas-interval", "1", *options)
    step, steps = running.optimizer.step, iter(range(1 << 30))

    def step_or_skip() -> Any:
        return (False, None, None) if next(steps) == 0 else step()

    running.optimizer.step = step_or_skip
    running.train(3)
    running.train(2)
    parameters: bytes = running.parameters().numpy().tobytes()
    return parameters


def test_a_skipped_first_step_under_overlap_changes_no_bit(megatron_ranks):
    plain = megatron_ranks(2, first_step_skipped)
    assert megatron_ranks(2, first_step_skipped, *OVERLAP) == plain


def all_steps_skipped() -> tuple[bool, bytes]:
    """Runs on a rank: the second of three calls skips all its steps."""
    _, running = started(*OVERLAP)
    step = running.optimizer.step
    running.train(2)
    before = running.parameters()
    running.optimizer.step = lambda: (False, None, None)
    running.train(2)
    running.optimizer.step = step
    same = bool((running.parameters() == before).all())
    running.train(2)
    return same, running.parameters().numpy().tobytes()


def test_a_call_that_skips_all_its_steps_leaves_training_intact(megatron_ranks):
    results = megatron_ranks(2, all_steps_skipped)
    assert all(same for same, _ in results)
    assert results[0][1] == results[1][1]
