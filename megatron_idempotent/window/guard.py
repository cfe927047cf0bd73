"""Finish a training window that fails on one rank, then stop it on all of them.

A rank that leaves a pipeline schedule half-way leaves messages that the next window consumes, and
collectives that its peers wait in. So a failing rank stays in the schedule: it sends and receives
zeros, starts the collectives that it owes, and all ranks stop together before gradients are
finalized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from .agreement import DEADLINE_S, WindowAborted, exchange, refuse_if_poisoned
from .guard_call import GuardedCall


def guarded_window(
    forward_backward_func: Callable[..., Any],
    *,
    optimizer: Any = None,
    deadline_s: float = DEADLINE_S,
    **arguments: Any,
) -> Any:
    """Run one window so that a failure of one rank ends it on all ranks and harms no later one.

    All ranks of the default group take part, once per window, in one all-reduce of one number on
    the host, right before `finalize_model_grads_func`. Without a failure nothing else is different.

    Args:
        forward_backward_func: what `get_forward_backward_func()` returns.
        optimizer: its gradients are zeroed too where the window is stopped.
        deadline_s: how long a rank waits at the window's end for the slowest one, in seconds.
        **arguments: the schedule's own: forward_step_func, data_iterator, model and so on.

    Returns:
        What the schedule returns.

    Raises:
        WindowAborted: some rank failed. Gradients are zero, and the next window is as if this one
            had not been; data iterators have advanced by different counts.
        SessionPoisoned: a failure that cannot be carried, or a rank that did not arrive.

    Example:
        run = functools.partial(guarded_window, get_forward_backward_func(), optimizer=optimizer)
        losses = run(forward_step_func=forward_step, data_iterator=data, model=chunks, **window)
    """
    refuse_if_poisoned()
    if getattr(forward_backward_func, "__module__", None) != schedules.__name__:
        raise ValueError(
            f"guarded_window() knows the schedules of {schedules.__name__}, found "
            f"{forward_backward_func!r}: pass what get_forward_backward_func() returns"
        )
    window = GuardedCall(arguments, functools.partial(exchange, deadline_s=deadline_s))
    returned = window.run(forward_backward_func)
    if window.failures:
        window.stop(optimizer)
        raise WindowAborted(
            window.failures, "All ranks finished the window and dropped its gradients."
        ) from window.error
    return returned
