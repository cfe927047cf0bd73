"""After an exception in `train_step` the next one trains on nothing and still updates.

Symptom:
    The `train_step` after one that raised reads no batch and runs no forward, but steps optimizer
    and scheduler on the partial, unreduced gradients of the failed window. The last pipeline stage
    then raises `UnboundLocalError: ... losses_reduced`, after the update; the other stages succeed.

Cause:
    The rerun state machine, which decides whether to run forward and backward, enters INITIAL_RUN
    when a step starts and leaves it when it is asked again behind the forward and backward. An
    exception in between leaves it there, and the next step takes its own start for that question.
    This holds in mode `disabled` too.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: when `train_step` raises, whatever it is, the machine goes back to where the
    step found it: a state that waits for a step, no rerun asked for, the same `current_iteration`.
    A machine that has decided to rerun from a checkpoint keeps that decision. Megatron never
    raises for those: it returns `should_exit`, and `train` exits. The samples of a statistic such
    as the largest gradient norm stay.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/rerun_state_machine.py,
    `should_run_forward_backward`.

Remove when:
    `train_step` resets the machine when it is left by an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import UNTRIED, Patch, Reproduction, Target

# A step is under way: state by name → where a next step has to find the machine.
_INTERRUPTED = {
    "INITIAL_RUN": "NOT_RUNNING_YET",
    "RERUNNING_IN_PLACE": "NOT_RUNNING_YET",
    "RERUNNING_FROM_CHECKPOINT": "WILL_RERUN_FROM_CHECKPOINT",
}


def live_machine() -> Any:
    """The process's rerun state machine, or None: upstream's getter would make one."""
    from megatron.core import rerun_state_machine

    return rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE


def abandon(machine: Any) -> None:
    """Take the machine out of the step it is in, if it is in one."""
    waiting = _INTERRUPTED.get(machine.state.name)
    if waiting is None:
        return
    machine.state = type(machine.state)[waiting]
    machine.restart_again_requested = False
    machine.continue_requested = False
    if waiting == "NOT_RUNNING_YET":  # what was loaded from a checkpoint is still to be rerun
        machine.current_iteration -= 1
        machine.rerun_requested = False
        machine.checkpoint_requested = False
        machine.failed_validation_call = None
        machine.initial_result = None
        machine.saved_state = None
        machine.saved_results = {}


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around upstream's `train_step`: an exception ends the step for the state machine too."""
    machine = live_machine()
    before = None if machine is None else machine.current_iteration
    try:
        return original(*args, **kwargs)
    except BaseException:
        machine = live_machine()
        if machine is not None:
            abandon(machine)
            # Behind the forward and backward, in the optimizer, say, no state is left to tell.
            if before is not None and machine.state.name == "NOT_RUNNING_YET":
                machine.current_iteration = before
        raise


def reproduce() -> None:
    """A step whose first batch is bad, and then a good one."""
    import importlib
    import inspect

    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.cpu import program

    running = program.start()
    running.train(1)  # sets what a step finds set
    training = importlib.import_module("megatron.training.training")

    known = inspect.signature(training.train_step).parameters

    def step(forward_step: Callable[..., Any]) -> None:
        iteration = {"iteration": running.args.curr_iteration} if "iteration" in known else {}
        training.train_step(
            forward_step,
            running.data[0],
            running.chunks,
            running.optimizer,
            running.scheduler,
            running.config,
            get_forward_backward_func(),
            **iteration,
        )

    def bad(data: Any, model: Any) -> Any:
        next(data)
        raise ValueError("bad batch")

    try:
        step(bad)
    except ValueError:
        step(running._forward_step)


PATCH = Patch(
    id="rerun-state-after-exception",
    summary="after an exception in train_step the next one reads no batch and still updates",
    since="0.12",
    before=UNTRIED,
    targets=(
        Target(
            address="megatron.training.training:train_step",
            wrapper=train_step,
            reviewed={
                "2007c94ab63b": "0.12.0 to 0.12.3",
                "465161e8904e": "0.13.0 to 0.13.1",
                "a059530984b7": "0.14.0 to 0.15.3",
                "c16d41019278": "0.16.0 to 0.17.1",
                "f67c1aed60e8": "dev, December 2025",
                "b031b31b4a39": "dev, February 2026",
                "fd9a6f35844e": "0.18.0 to 0.18.2",
                "da942a64d76d": "0.19.0 to 0.19.2",
                "d7550a88655d": "main, 12 August 2026",
                "c0ec140d6a0f": "main, August 2026",
                "fe3e90c01d89": "dev, August 2026",
                "b394b33345b2": "main, July 2026",
            },
        ),
    ),
    upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/rerun_state_machine.py",
    reproduction=Reproduction(
        run=reproduce, ranks=2, stock_error=r"UnboundLocalError: .*losses_reduced"
    ),
)
