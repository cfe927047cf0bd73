"""Gradients that come after an event, in a bucket group whose reductions overlap the backward.

With overlap_grad_reduce every gradient passes `register_grad_ready` of its bucket group, inside of
`no_sync` too, where that does nothing. Upstream keeps no record of a reduction that was dispatched:
its handle is None again as soon as it was waited for, and with several distributed-optimizer
instances there is none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_idempotent.engine import Target
from megatron_idempotent.megatron.ddp import bucket_groups, group_target

_WATCHES = "_megatron_idempotent_watches"
_DISPATCHED = "_megatron_idempotent_dispatched"
_POSTPONED = "_megatron_idempotent_postponed"
_LATE = "late"


def watch(group: Any, purpose: str) -> None:
    """Remember the first gradient of the bucket group that comes from here on."""
    vars(group).setdefault(_WATCHES, {})[purpose] = None
    if not _is_hooked(group):
        # An attribute of the instance, and only until the first one: a wrapper would run once per
        # parameter and microbatch.
        group.register_grad_ready = partial(_register, group, group.register_grad_ready)


def arrived(group: Any, purpose: str) -> Any:
    """The parameter whose gradient came first since `watch`; None if none has."""
    return vars(group).get(_WATCHES, {}).get(purpose)


def unwatch(group: Any, purpose: str) -> None:
    """Forget what came."""
    watches = vars(group).get(_WATCHES, {})
    watches.pop(purpose, None)
    if not watches and _is_hooked(group):
        del group.register_grad_ready


def _is_hooked(group: Any) -> bool:
    ours = vars(group).get("register_grad_ready")
    return isinstance(ours, partial) and ours.func is _register


def _register(
    group: Any, beneath: Callable[..., None], param: Any, *args: Any, **kwargs: Any
) -> None:
    watches = getattr(group, _WATCHES)
    for purpose, first in watches.items():
        watches[purpose] = param if first is None else first
    if _is_hooked(group):  # else somebody stands around it, and takes it away
        del group.register_grad_ready
    beneath(param, *args, **kwargs)


def dispatch_target(wrapper: Callable[..., None] | None = None) -> Target:
    """`start_grad_sync` of a bucket group. A `wrapper` of one's own calls `dispatching`."""
    return group_target("start_grad_sync", wrapper or dispatching)


def dispatching(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around a reduction's dispatch: what comes from here on comes too late for it."""
    original(self, *args, **kwargs)
    if self.ddp_config.overlap_grad_reduce and not vars(self).get(_POSTPONED, False):
        if not vars(self).get(_DISPATCHED, False):
            watch(self, _LATE)
        setattr(self, _DISPATCHED, True)


def postpone(group: Any, postponed: bool) -> None:
    """Say that a call of `start_grad_sync` puts the reduction off, or no more."""
    setattr(group, _POSTPONED, postponed)


def dispatched(group: Any) -> bool:
    """True if an overlapped reduction was dispatched and its window is not finished."""
    return vars(group).get(_DISPATCHED, False) or group.grad_reduce_handle is not None


def late(group: Any) -> Any:
    """The first parameter whose gradient came after the reduction was dispatched, or None."""
    return arrived(group, _LATE)


def ended(chunk: Any) -> None:
    """The chunk's reductions are finished, or its gradients are zeroed."""
    for group in bucket_groups(chunk):
        setattr(group, _DISPATCHED, False)
        unwatch(group, _LATE)
