"""After an exception in a training step the next one reads no batch and still updates.

Symptom:
    The `train_step` after one that raised reads no batch and runs no forward, but steps optimizer
    and scheduler on the partial, unreduced gradients of the failed window. The last pipeline stage
    then raises `UnboundLocalError: cannot access local variable 'losses_reduced' where it is not
    associated with a value`, after the update; the other stages succeed. A framework's own loop
    around `should_run_forward_backward`, such as NeMo-RL's, does the same.

Cause:
    The rerun state machine, which decides whether to run forward and backward, enters INITIAL_RUN
    at the first call in a step, and leaves it at the second call, after forward and backward. After
    an exception in between it stays in INITIAL_RUN, and takes the first call of the next step for
    the second one. This also happens in mode `disabled`.

Affects:
    Every release. What the patch does: the machine remembers the function call that began the step.
    If an exception has ended that call, the machine's next call first restores the state from
    before the step: waiting for a step, without a requested rerun, with the same
    `current_iteration`. This repairs every loop, Megatron's and a framework's. A machine that has
    decided to rerun from a checkpoint keeps that decision: Megatron never raises for those, it
    returns `should_exit`, and `train` exits. The samples of a statistic such as the largest
    gradient norm stay. The local variables of the failed call live until the machine's next call.
    The patch does not see an exception that the calling function catches itself, or one in a
    coroutine or generator: call `abort_window()`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/rerun_state_machine.py,
    `should_run_forward_backward`.

Remove when:
    a step that raised leaves the machine ready for the next step. By design: the machine cannot
    tell a new step from the end of an old one; a repair would be a new call for loops of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_idempotent.megatron import training

from ._case import Broken, Fault, Original, Patch, bench, target


def should_run_forward_backward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `should_run_forward_backward`: first reset the rerun machine if its last step raised."""
    training.abandon_if_left(self)
    runs = original(self, *args, **kwargs)
    if runs:
        training.began(self)
    else:
        training.ended(self)
    return runs


def state_dict(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the rerun machine's state for a checkpoint, after a reset if its last step raised."""
    training.abandon_if_left(self)
    return original(self, *args, **kwargs)


def reproduce() -> None:
    """Run two windows in a framework's own loop: the first cannot read its batch, the second can.
    On stock Megatron the second window reads no batch and has no losses.
    """
    model = bench()
    with suppress(Broken):
        _window(model, _unreadable)
    losses = _window(model, model._forward_step([]))
    if len(losses) != 2:
        raise Fault(f"{len(losses)} losses of 2 microbatches")


def _window(model: Any, forward_step: Callable[..., Any]) -> Any:
    """Run two microbatches in the loop of the rerun state machine, as NeMo-RL does.
    Return the losses.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    from megatron_idempotent.proof.cpu import tiny

    machine = get_rerun_state_machine()
    data = tiny.microbatches(0)
    while machine.should_run_forward_backward(data):
        losses_reduced = model.schedule(data, 2, forward_step)
    return losses_reduced


def _unreadable(data_iterator: Any, model: Any) -> Any:
    raise Broken("a microbatch that cannot be read")


PATCH = Patch(
    "after an exception in a step the next one reads no batch and still updates",
    target(
        "core.rerun_state_machine:RerunStateMachine.should_run_forward_backward",
        should_run_forward_backward,
    ),
    target("core.rerun_state_machine:RerunStateMachine.state_dict", state_dict),
    groups=("abort",),
    stock_error=r"UnboundLocalError: .*losses_reduced",
    loudness="both",
)
