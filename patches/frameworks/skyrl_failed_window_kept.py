"""After an exception in SkyRL's forward_backward the next step adds the failed window's gradients.

Symptom:
    A `forward_backward` that raises leaves the gradients of the microbatches before the exception
    in the buffers. The next window adds its own, and `optim_step` silently steps on the sum.

Cause:
    The buffers are zeroed only after a step, because a window may be several calls. A call that
    raises does not remove the gradients that it has added, and SkyRL has no function that aborts a
    window.

Affects:
    The wrapper of main, August 2026. What the patch does: if the first call of a window raises, it
    leaves zeroed buffers, so that the next window has the right bits. If earlier calls of the
    window succeeded, their gradients cannot be separated from the failed call's: all of them are
    dropped, and the step that would have used them raises a RuntimeError, once. All ranks have to
    fail in the same call.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/blob/main/skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py,
    `forward_backward_mini_batch`.

Remove when:
    SkyRL drops the window of a call that raised.
    `upstream/skyrl-failed-window-kept` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

from . import _skyrl
from ._skyrl import SkyRL

_LOST = "megatron_idempotent_lost_window"


def forward_backward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `forward_backward_mini_batch`; if it raises, drop this step's gradients so far.
    A forward-only call drops none.
    """
    earlier = self._pending_grad_sync is not None
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        if not kwargs.get("forward_only", False):
            for chunk in self.actor_module:
                chunk.zero_grad_buffer()
            self._pending_grad_sync = None
            if earlier:
                setattr(self, _LOST, True)
        raise


def run_pending_grad_sync(original: Original, self: Any) -> None:
    """Run `run_pending_grad_sync`; raise if a failed call has dropped this step's gradients."""
    if vars(self).pop(_LOST, False):
        for chunk in self.actor_module:
            chunk.zero_grad_buffer()
        self._pending_grad_sync = None
        raise RuntimeError(
            "optim_step() found a window in which a forward_backward() raised after others had "
            "succeeded: their gradients could not be separated, and all were dropped. Run the "
            "whole window again; the next step is right"
        )
    original(self)


def reproduce() -> None:
    """Run a step whose only `forward_backward` raises, then a step whose second of two raises.
    Without the patch the next step also uses gradients of the failed call.
    """
    skyrl = SkyRL(overlap_grad_reduce=False)
    skyrl.failing(("loss", 2), lambda: skyrl.forward_backward(7))
    skyrl.expect_no_gradients()
    skyrl.forward_backward(0)
    skyrl.failing(("loss", 2), lambda: skyrl.forward_backward(7))
    skyrl.forward_backward(1)
    try:
        skyrl.step()
    except RuntimeError as refusal:
        if "Run the whole window again" in str(refusal):
            return
        raise
    raise Fault("a step used a window that had lost gradients")


def control() -> object:
    """Run steps of two calls each, and log-prob passes, one of which raises, as a control.
    Return the losses and the parameters' bytes.
    """
    skyrl = SkyRL(overlap_grad_reduce=False)
    for seed in range(3):
        skyrl.forward_backward(seed)
        skyrl.logprobs(5)
        skyrl.failing(("loss", 1), lambda: skyrl.logprobs(5))
        skyrl.forward_backward(seed + 10)
        skyrl.step()
    losses, bits = skyrl.outcome()
    return [*map(str, losses), bits]


PATCH = Patch(
    "after an exception SkyRL's next step adds the failed window's gradients, silently",
    target(
        f"{_skyrl.WRAPPER}.forward_backward_mini_batch",
        forward_backward,
        "forward_backward_func",
        "self.actor_module",
    ),
    target(
        f"{_skyrl.WRAPPER}.run_pending_grad_sync",
        run_pending_grad_sync,
        "self._pending_grad_sync = None",
        "pending = self._pending_grad_sync",
    ),
    since="0.1",
    fixed_by=(
        (
            f"{_skyrl.WRAPPER}.forward_backward_mini_batch",
            "self._window_lost or self._pending_grad_sync is not None",
        ),
    ),
)
