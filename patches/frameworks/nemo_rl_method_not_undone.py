"""An exception in a method of NeMo-RL's Megatron workers leaves gradients off, and a timer running.

Symptom:
    `ValueError: Timer 'train' is already running` from the policy worker's `train` after one that
    raised, and from all later ones; the same for `get_logprobs`. After `get_logprobs`,
    `get_topk_logits`, `offload_before_refit` or the value worker's `get_values` raised, gradients
    are off in the process: the next `train` asserts `Communication call has not been issued for
    this bucket`, or, with the patches for Megatron, steps on gradients of zero.

Cause:
    The methods start the worker's timer, and enter `torch.no_grad()` without `with`. They undo both
    in their last lines, without a `finally`.

Affects:
    The workers of main, August 2026. What the patch does: a method with the decorator
    `wrap_with_nvtx_name("megatron_policy_worker/…")` or `"megatron_value_worker/…"` restores the
    grad mode if it raises, and drops the timers that it started. (The rerun state machine, because
    of which the next window would read no batch, is repaired in Megatron itself.) Methods that were
    decorated before `apply()` are not covered, and a warning says so: call `apply()` before the
    workers' modules are imported.

Upstream:
    https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/workers/megatron_policy_worker.py,
    `train`, `get_logprobs`.

Remove when:
    the workers stop timers in a `finally`, and use `with torch.no_grad():` blocks.
    `upstream/nemo-rl-method-not-undone` has the repair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

from . import _nemo_rl

_WORKERS = ("megatron_policy_worker/", "megatron_value_worker/")


def wrap_with_nvtx_name(original: Original, name: str) -> Any:
    """Wrap NeMo-RL's decorator of worker methods: clean up if a decorated method raises.
    Then gradients are turned on again if they were on, and timers that the method started are
    dropped.
    """
    decorate = original(name)
    return partial(_decorate, decorate) if name.startswith(_WORKERS) else decorate


def _decorate(decorate: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    decorated = decorate(method)

    def undoing(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _undoing(decorated, self, *args, **kwargs)

    # NeMo-RL's own decorator copies no attributes of the function, and nor does this.
    return update_wrapper(undoing, decorated, updated=())


def _undoing(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    gradients = torch.is_grad_enabled()
    running = getattr(vars(self).get("timer"), "_start_times", {})
    started_before = set(running)
    try:
        return method(self, *args, **kwargs)
    except BaseException:
        torch.set_grad_enabled(gradients)
        for label in set(running) - started_before:
            del running[label]
        raise


def reproduce() -> None:
    """Let log-prob, value and training calls of NeMo-RL's workers raise, and repeat each.
    Without the patch gradients are off, or a timer is running.
    """
    for worker in ("policy", "value"):
        _raise_and_go_on(worker)


def _raise_and_go_on(worker: str) -> None:
    import torch
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    nemo = _nemo_rl.NemoRL(worker, overlap_param_gather=True)
    infer = nemo.logprobs if worker == "policy" else nemo.values
    nemo.failing(("data", 0), lambda: infer(1))
    if not torch.is_grad_enabled():
        raise Fault(f"gradients are off after a pass of the {worker} worker that raised")
    infer(1)
    nemo.failing(("loss", 1), lambda: nemo.train(0))
    destroy_rerun_state_machine()  # what the failed window left in it is another hazard
    nemo.train(0)


PATCH = Patch(
    "an exception in a method of NeMo-RL's workers leaves gradients off, a timer running",
    target(
        "nemo_rl.utils.nsys:wrap_with_nvtx_name",
        wrap_with_nvtx_name,
        "ret = func(*args, **kwargs)",
        "return decorator",
        early_users=(
            "nemo_rl.models.policy.workers.megatron_policy_worker",
            "nemo_rl.models.value.workers.megatron_value_worker",
        ),
    ),
    since="0.1",
    fixed_by=((f"{_nemo_rl.POLICY}.get_logprobs", "self.timer.reset('get_logprobs')"),),
    loudness="both",
)
