"""What the rerun state machine knows after a `train_step` that raised."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_idempotent.proof import affected

pytestmark = pytest.mark.skipif(
    "rerun-state-after-exception" not in affected(),
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

    from megatron_idempotent.cpu import program

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
    """On a rank: a step that fails in its second microbatch, `failures` times, then a good one.

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
    while counted.read < 2 + 3:  # whoever did not fail skips what the failures have read
        next(counted)
    before = counted.read
    step(running._forward_step)
    machine = _machine()
    return machine.current_iteration, counted.read - before, machine.state.name, _digest(running)


def _digest(running: Any) -> str:
    import hashlib

    return hashlib.sha256(running.parameters().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("mode", MODES)
def test_the_step_after_one_that_raised_is_as_if_nothing_had_happened(megatron_ranks, mode):
    never = megatron_ranks(2, retried, mode, 0)
    assert megatron_ranks(2, retried, mode, 3) == never
    assert all(result[:3] == (2, 2, "NOT_RUNNING_YET") for result in never)


def failing_optimizer() -> tuple[int, int, str]:
    """On a rank: iteration before and after a step whose optimizer raised, and the state."""
    import megatron_idempotent

    megatron_idempotent.apply()
    running, _, step = _start("disabled")
    before = _machine().current_iteration

    def fail() -> None:
        raise ValueError("out of memory")

    running.optimizer.step = fail
    with pytest.raises(ValueError, match="out of memory"):
        step(running._forward_step)
    return before, _machine().current_iteration, _machine().state.name


def test_a_step_that_raises_in_its_optimizer_counts_as_none(megatron_ranks):
    for before, after, state in megatron_ranks(2, failing_optimizer):
        assert before == after
        assert state == "NOT_RUNNING_YET"


def interrupted_rerun(state: str) -> tuple[str, bool, Any]:
    """On a rank: a machine that was loaded from a checkpoint, or has asked for one, in a step."""
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
    return machine.state.name, machine.checkpoint_requested, machine.failed_validation_call


def test_a_rerun_from_a_checkpoint_that_was_interrupted_is_still_to_be_made(megatron_ranks):
    for result in megatron_ranks(1, interrupted_rerun, "WILL_RERUN_FROM_CHECKPOINT"):
        assert result == ("WILL_RERUN_FROM_CHECKPOINT", True, "the call")
