"""State of the rerun state machine after a step that raised, Megatron's or a framework's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_idempotent.patching.source import locate

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
    """A program after one iteration, its data, and its `train_step`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.proof.cpu import program

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
    import megatron_idempotent

    megatron_idempotent.apply()
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
    machine = _machine()
    return machine.current_iteration, counted.read - before, machine.state.name, _digest(running)


def _digest(running: Any) -> str:
    import hashlib

    return hashlib.sha256(running.parameters().numpy().tobytes()).hexdigest()


@needs_training
@pytest.mark.parametrize("mode", MODES)
def test_the_step_after_one_that_raised_is_as_if_nothing_had_happened(megatron_ranks, mode):
    never = megatron_ranks(2, retried, mode, 0)
    assert megatron_ranks(2, retried, mode, 3) == never
    assert all(result[:3] == (2, 2, "NOT_RUNNING_YET") for result in never)


def failing_optimizer() -> tuple[str, int]:
    """Runs on a rank: the state after a step whose optimizer raised, and what the next one
    reads."""
    import megatron_idempotent

    megatron_idempotent.apply()
    running, counted, step = _start("disabled")
    wanted = running.optimizer.step

    def fail() -> None:
        raise ValueError("out of memory")

    running.optimizer.step = fail
    with pytest.raises(ValueError, match="out of memory"):
        step(running._forward_step)
    state, before = _machine().state.name, counted.read
    running.optimizer.step = wanted
    step(running._forward_step)
    return state, counted.read - before


@needs_training
def test_a_step_that_raises_in_its_optimizer_is_followed_by_a_whole_one(megatron_ranks):
    assert megatron_ranks(2, failing_optimizer) == [("NOT_RUNNING_YET", 2)] * 2


def interrupted_rerun(state: str) -> tuple[str, bool, Any]:
    """Runs on a rank: a machine that was loaded from a checkpoint, or has asked for one, in a
    step."""
    from megatron.core.rerun_state_machine import RerunState

    import megatron_idempotent

    megatron_idempotent.apply()
    _, _, step = _start("validate_results")
    machine = _machine()
    machine.state = RerunState[state]
    machine.checkpoint_requested, machine.failed_validation_call = True, "the call"
    machine.initial_result = 1.0

    def bad(data: Any, model: Any) -> Any:
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        step(bad)
    machine.state_dict(None, "torch_dist")
    return machine.state.name, machine.checkpoint_requested, machine.failed_validation_call


@needs_training
def test_a_rerun_from_a_checkpoint_that_was_interrupted_is_still_to_be_made(megatron_ranks):
    for result in megatron_ranks(1, interrupted_rerun, "WILL_RERUN_FROM_CHECKPOINT"):
        assert result == ("WILL_RERUN_FROM_CHECKPOINT", True, "the call")


class _Broken(Exception):
    pass


def _loop(body: Callable[[], Any]) -> int:
    """A framework's own step: how often its body runs."""
    runs = 0
    while _machine().should_run_forward_backward(None):
        runs += 1
        body()
    return runs


def _fail() -> None:
    raise _Broken


def private_loops() -> dict[str, Any]:
    """Runs on a rank: how often loops of a framework's own run after others that raised."""
    import megatron_idempotent

    megatron_idempotent.apply()
    found: dict[str, Any] = {"at first": _loop(int)}
    with pytest.raises(_Broken):
        _loop(_fail)
    found["after one that raised"] = _loop(int)
    for _ in range(2):
        with pytest.raises(_Broken):
            _loop(_fail)
    found["after two"] = _loop(int)
    found["iteration"] = _machine().current_iteration

    cleanings: list[int] = []

    def cleaned_up() -> None:
        try:
            _fail()
        finally:  # what follows the exception in the call is not where it was raised
            cleanings.append(1)

    with pytest.raises(_Broken):
        _loop(cleaned_up)
    found["after a finally"] = _loop(int)
    return found


def test_a_loop_of_a_frameworks_own_runs_once_after_one_that_raised(megatron_ranks):
    assert megatron_ranks(1, private_loops, distributed=False) == [
        {
            "at first": 1,
            "after one that raised": 1,
            "after two": 1,
            "iteration": 2,
            "after a finally": 1,
        }
    ]


def _asks() -> bool:
    return _machine().should_run_forward_backward(None)


def _in_pieces() -> Any:
    while _machine().should_run_forward_backward(None):
        yield


def unlike_stock() -> dict[str, Any]:
    """Runs on a rank: loops that ask in other ways, stock and patched."""
    import megatron_idempotent

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

    programs = {
        "helper": asked_by_a_helper,
        "tried again": tried_again,
        "retried in the loop": retried_in_the_loop,
        "generator": lambda: len(list(_in_pieces())),
        "asked from elsewhere": lambda: [_asks(), _loop(int), _asks(), _asks()],
    }
    stock = {name: program() for name, program in programs.items()}
    megatron_idempotent.apply()
    assert {name: program() for name, program in programs.items()} == stock
    return stock


def test_loops_that_no_exception_has_left_run_as_often_as_on_stock(megatron_ranks):
    (found,) = megatron_ranks(1, unlike_stock, distributed=False)
    assert found == {
        "helper": 1,
        "tried again": 1,
        "retried in the loop": 1,
        "generator": 1,
        "asked from elsewhere": [True, 0, True, False],
    }


def kept_alive() -> tuple[bool, bool]:
    """Runs on a rank: whether a step's locals live after it, and after the step after a failed
    one."""
    import gc
    import weakref

    import megatron_idempotent

    megatron_idempotent.apply()

    class Batch:
        pass

    def step(body: Callable[[], Any]) -> Any:
        batch = Batch()
        seen.append(weakref.ref(batch))
        while _machine().should_run_forward_backward(None):
            body()
        return batch.__class__

    seen: list[Any] = []
    step(int)
    gc.collect()
    returned = seen[0]() is not None
    with pytest.raises(_Broken):
        step(_fail)
    step(int)
    gc.collect()
    return returned, seen[1]() is not None


def test_no_batch_is_kept_by_a_step_that_ended(megatron_ranks):
    assert megatron_ranks(1, kept_alive, distributed=False) == [(False, False)]
