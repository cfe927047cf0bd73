"""Whichever way `train()` and `evaluate()` end, what they set up is put back and counts agree."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from ranks import digest, on_ranks

import megatron_idempotent
from megatron_idempotent.patching.source import locate

MICROBATCHES = 4
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

pytestmark = [
    pytest.mark.patched,
    pytest.mark.full,
    pytest.mark.skipif(
        locate("megatron.training.training") is None,
        reason="this release's wheel does not carry megatron.training",
    ),
]


class Failure(Exception):
    """Breaks in the middle of training."""


def fail(*_: Any) -> Any:
    raise Failure


def started(*options: str) -> tuple[Any, Any]:
    """Upstream's module `training` and a program under the patches."""
    from megatron_idempotent.proof.cpu import program

    megatron_idempotent.apply(strict=True)
    running = program.start(options)
    return importlib.import_module("megatron.training.training"), running


def fails_from(call: Any, number: int) -> Any:
    """`call`, which raises from its call `number` on, counted from 0."""
    calls = iter(range(1 << 30))

    def maybe(*args: Any, **kwargs: Any) -> Any:
        return fail() if next(calls) >= number else call(*args, **kwargs)

    return maybe


def skip_step(running: Any, skipped: int | None) -> None:
    """Let one step of the optimizer be skipped, as an overflow does."""
    step, steps = running.optimizer.step, iter(range(1 << 30))
    running.optimizer.step = lambda: (False, None, None) if next(steps) == skipped else step()


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


@pytest.mark.parametrize(
    ("where", "completed", "skipped"),
    [
        ("forward", 2, None),
        ("optimizer", 2, None),
        ("losses", 3, None),
        ("on_training_step_end", 3, None),
        ("training_log", 3, None),
        ("post_training_step_callbacks", 3, None),
        ("checkpoint_and_decide_exit", 3, None),
        # A skipped step counts as an iteration, but not for the scheduler.
        ("training_log", 3, 2),
        ("on_training_step_end", 3, 2),
    ],
)
@on_ranks(2)
def test_after_an_exception_all_counts_tell_the_updates_made(where, completed, skipped):
    """Iteration 2 of 4 is interrupted."""
    training, running = started()
    args = running.args
    skip_step(running, skipped)
    break_at(training, running, where, 2)
    with pytest.raises((Failure, ValueError)):
        running.train(4)
    batch = args.global_batch_size
    per_batch = training.num_floating_point_operations(args, batch)
    assert running.scheduler.num_steps / batch == completed - (skipped is not None)
    assert {
        args.iteration,
        args.consumed_train_samples / batch,
        args.num_floating_point_operations_so_far / per_batch,
    } == {completed}


@on_ranks(2)
def test_iterations_left_out_on_request_are_counted():
    """Iterations 1 and 2 are left out, 3 is interrupted."""
    training, running = started()
    # Upstream counts these from 1 since 0.17; its own dummy step reads batches of another form.
    running.args.iterations_to_skip = [2, 3]
    training.dummy_train_step = lambda data_iterator: None
    break_at(training, running, "optimizer", 1)
    with pytest.raises(Failure):
        running.train(4)
    args = running.args
    assert (args.iteration, args.consumed_train_samples) == (3, 3 * args.global_batch_size)


@on_ranks(2)
def test_an_exit_condition_raises_systemexit_and_the_next_call_goes_on():
    _, running = started(*OVERLAP)
    running.args.exit_interval = 2
    with pytest.raises(SystemExit) as exit_:
        running.train(4)
    assert (exit_.value.code, running.args.iteration) == (0, 2)
    running.args.exit_interval = None
    running.train(0)  # up to the four iterations that were asked for before
    assert running.args.iteration == 4


@pytest.mark.parametrize(
    ("on_before", "interrupted"), [(False, False), (True, False), (True, True)]
)
@on_ranks(1)
def test_garbage_collection_is_what_it_was(on_before, interrupted):
    training, running = started("--manual-gc")
    if not on_before:
        gc.disable()
    if interrupted:
        break_at(training, running, "forward", 0)
    with pytest.raises(Failure) if interrupted else contextlib.nullcontext():
        running.train(1)
    assert gc.isenabled() == on_before


@on_ranks(1)
def test_an_optimizer_step_of_the_callers_own_survives():
    _, running = started()
    # Not as an option, which makes the optimizer capturable; and never capture: there is no CUDA.
    running.args.optimizer_cuda_graph, running.args.cuda_graph_warmup_steps = True, 100
    step = running.optimizer.step

    def own() -> Any:
        return step()

    running.optimizer.step = own
    running.train(1)
    assert running.optimizer.step is own


def first_step_skipped(*options: str) -> str:
    """Runs on a rank: the first of three steps is skipped, weights are compared in every
    iteration."""
    _, running = started("--check-weight-hash-across-dp-replicas-interval", "1", *options)
    skip_step(running, 0)
    running.train(3)
    running.train(2)
    return digest(running.parameters())


def test_a_skipped_first_step_under_overlap_changes_no_bit(megatron_ranks):
    plain = megatron_ranks(2, first_step_skipped)
    assert megatron_ranks(2, first_step_skipped, *OVERLAP) == plain


def all_steps_skipped() -> str:
    """Runs on a rank: the second of three calls skips all its steps."""
    _, running = started(*OVERLAP)
    step = running.optimizer.step
    running.train(2)
    before = running.parameters()
    running.optimizer.step = lambda: (False, None, None)
    running.train(2)
    running.optimizer.step = step
    assert (running.parameters() == before).all()
    running.train(2)
    return digest(running.parameters())


def test_a_call_that_skips_all_its_steps_leaves_training_intact(megatron_ranks):
    one, other = megatron_ranks(2, all_steps_skipped)
    assert one == other


@pytest.mark.parametrize("offloaded", [False, True])
@on_ranks(2)
def test_the_caller_s_finalize_function_is_called_in_every_train(offloaded):
    from megatron.core.distributed import finalize_model_grads
    from megatron.training import get_args

    _, running = started("--use-distributed-optimizer")
    # The flag itself wants Transformer Engine, for the copies, of which there are none here.
    get_args().offload_optimizer_states = offloaded
    calls = []

    def custom(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        finalize_model_grads(*args, **kwargs)

    running.train(1)  # leaves what `train()` has set in the config
    running.train(1)
    running.config.finalize_model_grads_func = custom
    for count in (1, 2, 3):
        running.train(1)
        assert len(calls) == count


# `evaluate()`.


def evaluate(training: Any, running: Any, forward_step: Callable[..., Any] | None = None) -> Any:
    """Upstream's result: (losses, collected data, whether the time limit was reached)."""
    forward_step = forward_step or running._forward_step
    return training.evaluate(forward_step, running.data[0], running.chunks, None, running.config)


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


@on_ranks(2)
def test_an_evaluation_that_raises_leaves_no_trace_and_the_next_one_runs():
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    training, running = started("--eval-iters", "2")
    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    running.config.timers = training.get_timers()
    before = state(training, running)
    with pytest.raises(Failure):
        evaluate(training, running, fail)
    assert state(training, running) == before
    losses, _, limit = evaluate(training, running)
    assert (len(losses), limit) == (1, False)
    running.args.exit_duration_in_mins = 1e-9
    before = state(training, running)
    _, _, limit = evaluate(training, running)
    assert (limit, state(training, running)) == (True, before), "at the time limit"


@pytest.mark.parametrize("whole_model", [True, False])
@on_ranks(1)
def test_what_the_caller_put_in_evaluation_mode_stays_in_it(whole_model):
    training, running = started("--eval-iters", "2")
    chunk = running.chunks[0]
    (chunk if whole_model else chunk.module.decoder).eval()
    before = [module.training for module in chunk.modules()]
    evaluate(training, running)
    assert [module.training for module in chunk.modules()] == before


@on_ranks(2)
def test_train_goes_on_after_an_evaluation_that_raised():
    """It raises after iteration 1."""
    training, running = started("--eval-iters", "2")
    args, step = running.args, running._forward_step
    args.do_valid, args.eval_interval = True, 1
    running._forward_step = lambda data, model: fail() if data is None else step(data, model)
    with pytest.raises(Failure):
        running.train(2)  # a program gives train() no data to evaluate on
    assert (args.iteration, state(training, running)[3]) == (1, [])
    running._forward_step = lambda data, model: step(data or running.data[0], model)
    running.train(0)
    assert args.iteration == 2


def losses_after_an_update(*options: str) -> list[float]:
    """Runs on a rank: evaluations after a step whose parameters were not gathered yet."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron_idempotent.proof.cpu.program import _batches

    training, running = started("--eval-iters", "2", *options)
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
    assert megatron_ranks(2, losses_after_an_update, *OVERLAP) == plain
    assert plain[0][0] == plain[0][1]
