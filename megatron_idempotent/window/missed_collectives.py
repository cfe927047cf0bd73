"""Starts the collectives that data-parallel peers wait for after this rank has stopped computing.

Peers start them from hooks: parameter gathers before a module's first forward, reductions after
the last gradient of a bucket group. A rank whose forward or backward did not run has to start them
itself, in the peers' order, because a group's collectives pair up by order alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys
from megatron_idempotent.window.agreement import describe, poison

from .open_contexts import drop_coalescing_of

#: A bucket group's counts of gradients by parameter, from 0.16 on.
_COUNTS = "per_param_grad_ready_counts"
# Chunk → indices of its bucket groups, in the order in which hooks last started their reductions.
_learned: PerProcessWeakKeys[Any, list[int]] = PerProcessWeakKeys(__name__, "_learned")


class MissedCollectives:
    """Tracks which bucket groups this rank reduced in a window; starts the missing reductions."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._started: dict[int, list[int]] = {index: [] for index in range(len(chunks))}
        # Per chunk, its groups in the order in which their last gradient became ready in this
        # backward (an ordered set), and the same for the last complete backward.
        self._ready: list[dict[int, None]] = [{} for _ in chunks]
        self._order: list[list[int]] = [[] for _ in chunks]
        # Per chunk and bucket group, the result of `_counts` after the last complete backward.
        self._counted: list[list[int]] = [[] for _ in chunks]
        # A parameter per bucket group, looked up once, because each microbatch reads its count.
        # Before 0.16 no group has counts.
        self._firsts: list[list[tuple[Any, Any]]] = [
            [(group, _first(group)) for group in bucket_groups(chunk) if hasattr(group, _COUNTS)]
            for chunk in chunks
        ]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record, during the block, which bucket groups start their reductions, and in which order.
        The block replaces the groups' `start_grad_sync`, `start_param_sync` and
        `finish_param_sync`.

        Until the order of a chunk's reductions is known, also record when gradients become ready:
        every backward shows that order, while reductions start in the last one only.
        """
        noted, registering = [], []
        both = zip(self._chunks, self._started.values(), self._ready, strict=True)
        for chunk_index, (chunk, started, ready) in enumerate(both):
            self._counted[chunk_index] = _counts(self._firsts[chunk_index])
            for number, group in enumerate(bucket_groups(chunk)):
                if chunk not in _learned:
                    earlier_hook = vars(group).get("register_grad_ready")
                    hook = functools.partial(_note_ready, group.register_grad_ready, ready, number)
                    group.register_grad_ready = hook
                    registering.append((group, hook, earlier_hook))
                reduce = functools.partial(_note, group.start_grad_sync, started, number)
                group.start_grad_sync = functools.partial(_start, group, reduce)
                group.start_param_sync = functools.partial(_start, group, group.start_param_sync)
                group.finish_param_sync = functools.partial(_wait, group, group.finish_param_sync)
                noted.append(group)
        try:
            yield
        finally:
            for group in noted:
                vars(group).pop("start_grad_sync", None)
                vars(group).pop("start_param_sync", None)
                vars(group).pop("finish_param_sync", None)
                vars(group).pop("check_grads", None)
            for group, hook, earlier_hook in registering:
                # If a patch has wrapped it since, the patch removes both.
                if vars(group).get("register_grad_ready") is hook:
                    del group.register_grad_ready
                    if earlier_hook is not None:
                        group.register_grad_ready = earlier_hook

    def reduce(self, chunk: Any) -> None:
        """Start a chunk's missing reductions of zeros, if peers' hooks start them in this backward.
        Peers are the other ranks of the data-parallel group.
        """
        groups = bucket_groups(chunk)
        chunk_index = self._chunks.index(chunk)
        started = self._started[chunk_index]
        if not groups or not _starts_from_hooks(groups[0]) or not self._is_last(chunk_index):
            return
        # Until a backward has shown the order, assume that of the buckets.
        for number in _learned.get(chunk) or self._order[chunk_index] or range(len(groups)):
            group = groups[number]
            if number in started:
                continue
            for bucket in group.buckets:
                bucket.grad_data.zero_()
            # This check may be the one that failed; zeros need no check.
            group.check_grads = _no_check
            if getattr(chunk, "force_all_reduce", False):
                group.start_grad_sync(force_all_reduce=True)
            else:
                group.start_grad_sync()

    def _is_last(self, chunk_index: int) -> bool:
        """Count a backward that this rank skips; return whether this is the backward in which hooks
        on the peers start reductions.

        From 0.16 on several backwards may precede that one in a step: calls outside of `no_sync`,
        or microbatches without it.
        """
        groups = bucket_groups(self._chunks[chunk_index])
        learned = [getattr(g, "golden_per_param_grad_ready_counts", None) for g in groups]
        expected = [
            counts[_first(group)] for group, counts in zip(groups, learned, strict=True) if counts
        ]
        if len(expected) < len(groups):
            return True  # before 0.16 each window has one such backward
        # The number of backwards in a step: in each of them some parameter registers once.
        backwards = math.gcd(*(n for counts in learned if counts for n in counts.values()))
        self._counted[chunk_index] = [
            counted + count // backwards
            for counted, count in zip(self._counted[chunk_index], expected, strict=True)
        ]
        return self._counted[chunk_index] == expected

    def check(self) -> None:
        """Check unreduced gradients for NaN and large values, if the DDP config asks for it.
        Upstream would make this check when the reduction starts.

        Then the rank with the NaN would raise while its peers enter the reduction.
        """
        for chunk, started in zip(self._chunks, self._started.values(), strict=True):
            for number, group in enumerate(bucket_groups(chunk)):
                options = group.ddp_config
                has_check = options.check_for_nan_in_grad or options.check_for_large_grads
                # Extra main gradients reach the buffer only as the reduction starts.
                outside = any(
                    getattr(bucket, "params_with_extra_main_grads", None)
                    for bucket in group.buckets
                )
                if has_check and number not in started and not outside:
                    group.check_grads(
                        check_for_nan_or_inf=options.check_for_nan_in_grad,
                        check_for_large=options.check_for_large_grads,
                    )
                    group.check_grads = _no_check

    @contextlib.contextmanager
    def backward(self, chunk: Any) -> Iterator[None]:
        """Record, in the block, the order in which a chunk's bucket groups get their last gradient.
        The block runs one backward.
        """
        chunk_index = self._chunks.index(chunk)
        ready = self._ready[chunk_index]
        ready.clear()
        yield
        self._counted[chunk_index] = _counts(self._firsts[chunk_index])
        if len(ready) == len(bucket_groups(chunk)):
            self._order[chunk_index] = list(ready)

    def learn(self, failed: bool) -> None:
        """Keep, for each chunk, the order in which its hooks start reductions.
        Later windows in which this rank fails start the missing reductions in this order.
        """
        for chunk_index, (chunk, started) in enumerate(
            zip(self._chunks, self._started.values(), strict=True)
        ):
            groups = bucket_groups(chunk)
            from_hooks = bool(groups) and _starts_from_hooks(groups[0])
            if from_hooks and len(started) == len(groups) and not failed:
                _learned[chunk] = list(started)
            elif self._order[chunk_index]:
                _learned[chunk] = self._order[chunk_index]


def gathers_by_hooks(chunk: Any) -> bool:
    """Return whether forward pre-hooks of the chunk start its gathers and wait for them."""
    return bool(getattr(chunk, "remove_forward_pre_hook_handles", None))


def gather_params(chunk: Any, *, wait: bool = True) -> None:
    """Start the parameter gathers of a chunk that other ranks start by their forward pre-hooks.
    With `wait`, also wait for the gathers.
    """
    if not gathers_by_hooks(chunk):
        return
    chain = [*reversed(chunk.bucket_groups), *reversed(chunk.expert_parallel_bucket_groups)]
    # Start all gathers before waiting for any: peers alternate between dense and expert
    # parameters, and waiting in a different order than theirs would deadlock.
    for group in chain:
        if not group.param_gather_dispatched:
            _start(group, group.start_param_sync)
    for group in chain if wait else ():
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def _start(group: Any, start: Callable[..., None], *args: Any, **kw: Any) -> None:
    """Start a bucket group's collective by `start`.
    If `start` raises after the collective has begun, poison the session: further guarded windows
    are refused.

    A collective that started without being recorded would be started again, and the second one
    would pair up with another collective of the peers.
    """
    counts_before = _collectives(group)
    try:
        start(*args, **kw)
    except BaseException as error:
        if _collectives(group) != counts_before:
            poison(f"a collective was left as it started: {describe(error)}")
        # Collectives that were coalesced but not started must not join the next launch.
        drop_coalescing_of(group)
        raise


def _wait(group: Any, finish: Callable[..., None], *args: Any, **kw: Any) -> None:
    """Wait for a parameter gather by `finish`.
    If that fails, for example because a peer never joins, poison the session: further guarded
    windows are refused.
    """
    try:
        finish(*args, **kw)
    except RuntimeError as lost:
        if group.param_gather_handle is None:
            raise  # the wait had ended, or had not begun
        raise poison(f"parameters were not gathered: {describe(lost)}") from lost


def _note(
    start: Callable[..., None], started: list[int], number: int, *args: Any, **kw: Any
) -> None:
    start(*args, **kw)
    if number not in started:
        started.append(number)


def _collectives(group: Any) -> list[int]:
    """Return the number of collectives started so far in each process group of a bucket group."""
    values = vars(group).values()
    process_groups: list[Any] = [value for value in values if isinstance(value, dist.ProcessGroup)]
    return [int(item._get_sequence_number_for_group()) for item in process_groups]


def _note_ready(
    register: Callable[..., None], ready: dict[int, None], number: int, *args: Any, **kw: Any
) -> None:
    ready.pop(number, None)
    ready[number] = None
    register(*args, **kw)


def _counts(firsts: list[tuple[Any, Any]]) -> list[int]:
    """Return how often the first parameter of each bucket group has registered its gradient."""
    return [group.per_param_grad_ready_counts.get(first, 0) for group, first in firsts]


def _first(group: Any) -> Any:
    return group.buckets[0].params_list[0]


def _starts_from_hooks(group: Any) -> bool:
    return (
        group.ddp_config.overlap_grad_reduce
        and group.is_last_microbatch
        and not getattr(group, "is_first_batch", False)
    )


def _no_check(**_: Any) -> None:
    """Do nothing, in place of a bucket group's gradient check that has run already, or would check
    zeros.
    """
