"""After an exception in Bridge's `train_step` the next one trains on nothing and still updates.

Symptom:
    The `train_step` after one that raised reads no batch and runs no forward, but steps optimizer
    and scheduler on the partial, unreduced gradients of the failed window. The last pipeline stage
    then raises `UnboundLocalError: ... losses_reduced`, after the update; the other stages succeed.

Cause:
    As in `rerun-state-after-exception`: the step asks the rerun state machine whether to run
    forward and backward, and an exception leaves the machine in the middle of the step.

Affects:
    Every release, read from 0.3.1 to 0.6.2. What the patch does: the machine goes back to where the
    step found it, and the timers that the step started are stopped.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/train.py,
    `train_step`.

Remove when:
    Bridge's `train_step` resets the machine when it is left by an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_idempotent.engine import OPEN, Patch, Reproduction, Target, arguments

from . import rerun_state_after_exception
from ._timers import stopping


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around Bridge's `train_step`: an exception ends the step for machine and timers too."""
    timers = arguments(original, args, kwargs)["global_state"].timers
    step = partial(stopping, timers, original)
    return rerun_state_after_exception.train_step(step, *args, **kwargs)


def reproduce() -> None:
    """A step whose first batch is bad, and then a good one."""
    from ._bridge import Bridge
    from ._train import Broken

    bridge = Bridge()
    good = bridge.forward_step

    def bad(data: Any, model: Any) -> Any:
        raise Broken("a microbatch that cannot be read")

    bridge.forward_step = bad
    with contextlib.suppress(Broken):
        bridge.step()
    bridge.forward_step = good
    bridge.step()


PATCH = Patch(
    id="bridge-step-after-exception",
    distribution="megatron-bridge",
    summary="after an exception in Bridge's train_step the next one reads no batch and updates",
    since="0.3",
    before=OPEN,
    targets=(
        Target(
            address="megatron.bridge.training.train:train_step",
            wrapper=train_step,
            relies_on=(
                "timers = global_state.timers",
                "rerun_state_machine.should_run_forward_backward(data_iterator)",
                "rerun_state_machine.should_checkpoint_and_exit()",
            ),
        ),
    ),
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/train.py",
    reproduction=Reproduction(
        run=reproduce, ranks=2, stock_error=r"UnboundLocalError: .*losses_reduced"
    ),
)
