"""After an exception in ROLL's train_step the next one adds the failed window's gradients.

Symptom:
    A `train_step` of the Megatron strategy that raises leaves gradients in the buffers. The next
    one adds its own and steps on the sum, silently. If hooks had started reductions, it asserts, or
    reduces again.

Cause:
    `train_step` zeroes the buffers only in its last lines.

Affects:
    The strategy of main, August 2026. What the patch does: if `train_step` raises, the buffers and
    the optimizer's gradients are zeroed, as at its normal end. All ranks have to fail in the same
    call.

Upstream:
    https://github.com/alibaba/ROLL/blob/main/roll/distributed/strategy/megatron_strategy.py,
    `MegatronTrainStrategy.train_step`.

Remove when:
    `train_step` zeroes the buffers before its window, or in a `finally`.
    `upstream/roll-failed-window-kept` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Original, Patch, target

from . import _copies, _roll


def train_step(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ROLL's `train_step`; if it raises, zero the gradients, as the next call expects."""
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        for model in self.model:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        raise


def reproduce() -> None:
    """Run a ROLL `train_step` whose loss raises, then check the gradients, and run another.
    Without the patch the failed step's gradients stay in the buffers.
    """
    roll = _roll.Roll(overlap_grad_reduce=False)
    roll.failing(("loss", 2), lambda: roll.train(7))
    roll.expect_no_gradients()
    roll.train(0)


PATCH = Patch(
    "after an exception ROLL's next train_step adds the failed one's gradients, silently",
    target(
        f"{_roll.MODULE}:MegatronTrainStrategy.train_step",
        train_step,
        "model.zero_grad_buffer()",
        "self.optimizer.zero_grad()",
    ),
    since="0.0",
    fixed_when=_copies.cleans_up("self.optimizer.zero_grad()", in_handler=True),
    loudness="both",
)
