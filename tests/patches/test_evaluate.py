"""Whichever way `evaluate()` ends, the model and the config are as they were."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


class Failure(Exception):
    """Breaks in the middle of an evaluation."""


def fail(*_: Any) -> Any:
    raise Failure


def started(*options: str) -> tuple[Any, Any]:
    """Runs on a rank: upstream's module `training` and a program under the patches."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import program

    megatron_idempotent.apply(strict=True)
    running = program.start([*options, "--eval-iters", "2"])
    return importlib.import_module("megatron.training.training"), running


def evaluate(training: Any, running: Any, forward_step: Callable[..., Any] | None = None) -> Any:
    """Upstream's result: (losses, collected data, whether the time limit was reached)."""
    return training.evaluate(
        forward_step or running._forward_step,
        running.data[0],
        running.chunks,
        None,
        running.config,
    )


def state(training: Any, running: Any) -> tuple[Any, ...]:
    """All that `evaluate()` touches."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    timers = training.get_timers()
    return (
        [module.training for module in running.chunks[0].modules()],
        get_rerun_state_machine().get_mode(),
        running.config.timers is timers,
        sorted(name for name, timer in timers._timers.items() if timer._started),
    )


def interrupted() -> tuple[bool, bool, int]:
    """Runs on a rank: after an exception; whether all is as before, and the next evaluation's
    losses."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    training, running = started()
    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    running.config.timers = training.get_timers()
    before = state(training, running)
    with pytest.raises(Failure):
        evaluate(training, running, fail)
    same = state(training, running) == before
    losses, _, limit = evaluate(training, running)
    return same, limit, len(losses)


def test_an_evaluation_that_raises_leaves_no_trace_and_the_next_one_runs(megatron_ranks):
    assert megatron_ranks(2, interrupted) == [(True, False, 1)] * 2


def out_of_time() -> tuple[bool, bool]:
    """Runs on a rank: whether the time limit was reached, and whether all is as before."""
    training, running = started()
    running.config.timers = training.get_timers()
    running.args.exit_duration_in_mins = 1e-9
    before = state(training, running)
    _, _, limit = evaluate(training, running)
    return limit, state(training, running) == before


def test_an_evaluation_at_the_time_limit_leaves_no_trace(megatron_ranks):
    assert megatron_ranks(2, out_of_time) == [(True, True)] * 2


def modes_of_the_caller(whole_model: bool) -> bool:
    """Runs on a rank: evaluation mode is the caller's, for the model or for one module of it."""
    training, running = started()
    chunk = running.chunks[0]
    (chunk if whole_model else chunk.module.decoder).eval()
    before = [module.training for module in chunk.modules()]
    evaluate(training, running)
    return [module.training for module in chunk.modules()] == before


@pytest.mark.parametrize("whole_model", [True, False])
def test_what_the_caller_put_in_evaluation_mode_stays_in_it(whole_model, megatron_ranks):
    assert megatron_ranks(1, modes_of_the_caller, whole_model) == [True]


def evaluation_inside_train() -> tuple[int, list[str], int]:
    """Runs on a rank: `train()` whose evaluation raises after iteration 1, then another one."""
    training, running = started()
    args, step = running.args, running._forward_step
    args.do_valid, args.eval_interval = True, 1
    running._forward_step = lambda data, model: fail() if data is None else step(data, model)
    with pytest.raises(Failure):
        running.train(2)  # a program gives train() no data to evaluate on
    reached, (_, _, _, timers) = args.iteration, state(training, running)
    running._forward_step = lambda data, model: step(data or running.data[0], model)
    running.train(0)
    return reached, timers, args.iteration


def test_train_goes_on_after_an_evaluation_that_raised(megatron_ranks):
    assert megatron_ranks(2, evaluation_inside_train) == [(1, [], 2)] * 2


def losses_after_an_update(*options: str) -> list[float]:
    """Runs on a rank: evaluations after a step whose parameters were not gathered yet."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron_idempotent.proof.cpu.program import _batches

    training, running = started(*options)
    training.checkpoint_and_decide_exit, decide = fail, training.checkpoint_and_decide_exit
    with pytest.raises(Failure):
        running.train(2)
    training.checkpoint_and_decide_exit = decide
    losses = []
    for _ in range(2):
        running.data = [RerunDataIterator(_batches(3, running.args.micro_batch_size))]
        losses += [float(loss) for loss in evaluate(training, running)[0].values()]
    running.train(1)
    return [*losses, *running.losses]


def test_evaluations_between_two_calls_see_the_update_under_overlap(megatron_ranks):
    plain = megatron_ranks(2, losses_after_an_update)
    overlapped = megatron_ranks(2, losses_after_an_update, *OVERLAP)
    assert overlapped == plain
    assert plain[0][0] == plain[0][1]
