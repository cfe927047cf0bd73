"""State of the rerun state machine after a step that raised, Megatron's or a framework's own."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import digest, on_ranks, patch

import megatron_idempotent
from megatron_idempotent.patching.source import locate

pytestmark = pytest.mark.full

needs_training = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="the installed Megatron carries no megatron.training",
)

# Not report_determinism_stats: no option selects it, and on 0.17.1 it fails without any exception.
MODES = ["disabled", "validate_results"]


class _Counted:
    """Microbatches read from a program's data."""

    def __init__(self, data: Any) -> None:
        self.data, self.read = data, 0

    def __next__(self) -> Any:
        self.read += 1
        return next(self.data)


def _start(mode: str) -> tuple[Any, _Counted, Callable[[Callable[..., Any]], Any]]:
    """A patched program after one iteration, its data, and its `train_step`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.proof.cpu import program

    patch()
    running = program.start(["--rerun-mode", mode], num_microbatches=2)
    (data,) = running.data
    data.iterable = counted = _Counted(data.iterable)
    running.train(1)
    training = importlib.import_module("megatron.training.training")

    def step(forward_step: Callable[..., Any]) -> Any:
        return training.train_step(
            forward_step,
            data,
            running.chunks,
            running.optimizer,
            running.scheduler,
            running.config,
            get_forward_backward_func(),
            iteration=running.args.curr_iteration,
        )

    return running, counted, step


def _machine() -> Any:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    return get_rerun_state_machine()


def retried(mode: str, failures: int) -> tuple[int, Any, str, Any]:
    """Runs on a rank: a step that fails in its second microbatch, `failures` times, then a good
    one.

    Iteration of the machine, microbatches read by the good step, its state, and the parameters.
    """
    running, counted, step = _start(mode)
    left = [0]

    def bad(data: Any, model: Any) -> Any:
        left[0] += 1
        if left[0] % 2 == 0:
            raise KeyboardInterrupt
        return running._forward_step(data, model)

    for _ in range(failures):
        with pytest.raises(KeyboardInterrupt):
            step(bad)
    while counted.read < 2 + 3:  # a rank that did not fail skips what the failures have read
        next(counted)
    before = counted.read
    step(running._forward_step)
    read, machine = counted.read - before, _machine()
    return machine.current_iteration, read, machine.state.name, digest(running.parameters())


@needs_training
@pytest.mark.patched
@pytest.mark.parametrize("mode", MODES)
def test_the_step_after_one_that_raised_is_as_if_nothing_had_happened(megatron_ranks, mode):
    never = megatron_ranks(2, retried, mode, 0)
    assert megatron_ranks(2, retried, mode, 3) == never
    assert all(result[:3] == (2, 2, "NOT_RUNNING_YET") for result in never)


@needs_training
@pytest.mark.patched
@on_ranks(2)
def test_a_step_that_raises_in_its_optimizer_is_followed_by_a_whole_one():
    running, counted, step = _start("disabled")
    wanted = running.optimizer.step

    running.optimizer.step = _fail
    with pytest.raises(_Broken):
        step(running._forward_step)
    assert _machine().state.name == "NOT_RUNNING_YET"
    before, running.optimizer.step = counted.read, wanted
    step(running._forward_step)
    assert counted.read - before == 2


@needs_training
@on_ranks(1)
def test_a_rerun_from_a_checkpoint_that_was_interrupted_is_still_to_be_made():
    """The machine was loaded from a checkpoint, or has asked for one, in a step."""
    from megatron.core.rerun_state_machine import RerunState

    _, _, step = _start("validate_results")
    machine = _machine()
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.checkpoint_requested, machine.failed_validation_call = True, "the call"
    machine.initial_result = 1.0

    with pytest.raises(_Broken):
        step(_fail)
    machine.state_dict(None, "torch_dist")
    assert machine.state is RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert (machine.checkpoint_requested, machine.failed_validation_call) == (True, "the call")


class _Broken(Exception):
    pass


def _loop(body: Callable[[], Any]) -> int:
    """A framework's own step: how often its body runs."""
    runs = 0
    while _machine().should_run_forward_backward(None):
        runs += 1
        body()
    return runs


def _fail(*_: Any) -> None:
    raise _Broken


def _failed(body: Callable[[], Any] = _fail) -> None:
    with pytest.raises(_Broken):
        _loop(body)


@on_ranks(1, distributed=False)
def test_a_loop_of_a_frameworks_own_runs_once_after_one_that_raised():
    megatron_idempotent.apply()
    assert _loop(int) == 1
    _failed()
    assert _loop(int) == 1
    _failed()
    _failed()
    assert _loop(int) == 1
    assert _machine().current_iteration == 2

    def cleaned_up() -> None:
        try:
            _fail()
        finally:  # what follows the exception in the call is not where it was raised
            gc.isenabled()

    _failed(cleaned_up)
    assert _loop(int) == 1


def _asks() -> bool:
    return _machine().should_run_forward_backward(None)  # type: ignore[no-any-return]


def _in_pieces() -> Iterator[None]:
    while _machine().should_run_forward_backward(None):
        yield


@on_ranks(1, distributed=False)
def test_loops_that_no_exception_has_left_run_as_often_as_on_stock():
    """Loops that ask in other ways, stock and patched."""

    def asked_by_a_helper() -> int:
        runs = 0
        while _asks():
            runs += 1
        return runs

    def tried_again() -> int:
        failures = [True]

        def body() -> None:
            try:
                if failures.pop():
                    _fail()
            except (_Broken, IndexError):
                return

        return _loop(body)

    def retried_in_the_loop() -> int:
        runs = 0
        while _machine().should_run_forward_backward(None):
            try:
                _fail()
            except _Broken:
                runs += 1
        return runs

    for apply in (lambda: None, megatron_idempotent.apply):
        apply()
        assert (asked_by_a_helper(), tried_again(), retried_in_the_loop()) == (1, 1, 1)
        assert len(list(_in_pieces())) == 1
        assert [_asks(), _loop(int), _asks(), _asks()] == [True, 0, True, False]


@on_ranks(1, distributed=False)
def test_no_batch_is_kept_by_a_step_that_ended():
    """A step's locals are gone after it, and after the step after a failed one."""
    megatron_idempotent.apply()

    class Batch:
        pass

    seen: list[Any] = []

    def step(body: Callable[[], Any]) -> Any:
        batch = Batch()
        seen.append(weakref.ref(batch))
        while _machine().should_run_forward_backward(None):
            body()
        return batch.__class__

    step(int)
    gc.collect()
    assert seen[0]() is None
    with pytest.raises(_Broken):
        step(_fail)
    step(int)
    gc.collect()
    assert seen[1]() is None
