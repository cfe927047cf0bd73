"""Tells all ranks whether any rank failed, before they continue.

The agreement runs on gloo groups of its own, over the host: it never waits for the GPU, it has a
deadline, and it still works where NCCL or a pipeline message is stuck. Once ranks can no longer
agree, the session is poisoned: messages that were sent and never received cannot be recalled.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_idempotent.patching.base import PerProcess, PerProcessDict

DEADLINE_S = 600.0
"""Seconds that a rank waits for the slowest one; ranks of one window differ by less."""

LONGEST_S = 1e9
"""Seconds of the longest deadline, 31 years: torch's timeouts are nanoseconds in 64 bits."""

LOCKSTEP_S = 30.0
"""Seconds that a rank which failed in a layer waits for its tensor-parallel peers to fail too."""

# Name of a group of ranks, and the deadline in seconds → the default group at its creation, and the
# gloo group. Each deadline needs a gloo group, because collectives take no timeout of their own.
_control: dict[tuple[str, float], tuple[Any, Any]] = PerProcessDict(__name__, "_control")


class _Session(PerProcess):
    poisoned: str | None = None
    # The number of rebuilds, which tells an old reason in the store from a new one.
    number = 0
    # Whether ranks are in an `as_one` block, and no rank has reported an error in it.
    as_one = False


_session = _Session(__name__, "_session")


class WindowAborted(RuntimeError):
    """Is raised on all ranks after some ranks failed; the message says what to do next.

    `failures` maps global ranks to what happened there. On those ranks the original error is the
    `__cause__`, and the message begins with it. `rank` is the global rank of this process, None
    without process groups.
    """

    def __init__(
        self, failures: Mapping[int, str], consequence: str, rank: int | None = None
    ) -> None:
        self.failures = dict(failures)
        self.consequence = consequence
        if rank is None and dist.is_initialized():
            rank = dist.get_rank()
        self.rank = rank
        # This rank's error comes first, because there may be hundreds of ranks with long errors.
        ordered = sorted(self.failures.items(), key=lambda item: (item[0] != rank, item[0]))
        errors = "; ".join(f"rank {number}: {text}" for number, text in ordered)
        super().__init__(f"{errors}. {consequence}")

    def __reduce__(self) -> tuple[type[WindowAborted], tuple[dict[int, str], str, int | None]]:
        # The default would rebuild the error from its message.
        return type(self), (self.failures, self.consequence, self.rank)


class SessionPoisoned(RuntimeError):
    """Is raised after ranks have left a window at different points.
    Messages of that window may still be in flight, so all further guarded windows are refused.

    `rebuild_process_groups()` or a restart of the processes ends this state.
    """


def agree(error: BaseException | None = None, *, deadline_s: float = DEADLINE_S) -> None:
    """Raise on all ranks if any rank passes an error; call it before a schedule starts.

    All ranks of the default group take part: one all-reduce of one number, on the host. The first
    call with a given deadline also creates its group.

    Args:
        error: the failure of this rank, such as a bad batch; None if there is none.
        deadline_s: how long to wait for the slowest rank, in seconds.

    Raises:
        WindowAborted: some rank failed. No rank has started the window, so all may go on.
        SessionPoisoned: the ranks cannot agree within the deadline, or could not before.
        ValueError: the deadline is no positive number of seconds, or is infinite.

    Example:
        error = None
        try:
            batch = pack(rollouts)
        except ValueError as bad:
            error = bad
        agree(error)
    """
    deadline_s = checked_deadline(deadline_s)
    refuse_if_poisoned()
    failures = exchange(None if error is None else describe(error), deadline_s)
    if failures:
        raise WindowAborted(failures, "No rank has started the window.") from error


def checked_deadline(deadline_s: Any) -> float:
    """Return a deadline in seconds as a float; raise unless it is a possible timeout of a process
    group.

    Raises:
        ValueError: it is no number, not positive, or longer than `LONGEST_S`.
    """
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)):
        raise ValueError(f"deadline_s is a number of seconds, got {deadline_s!r}")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s must be positive, got {deadline_s!r}")
    if deadline_s > LONGEST_S:
        raise ValueError(
            f"deadline_s is {deadline_s!r}, and the longest timeout of a process group is "
            f"{LONGEST_S:g} seconds: pass that to wait for ever"
        )
    return float(deadline_s)


def exchange(failure: str | None, deadline_s: float, group: Any = None) -> dict[int, str]:
    """Return global rank → error text for all ranks that failed.
    `failure` is this rank's error text, or None. A collective: one all-reduce if no rank failed.

    `group` is a gloo group with that deadline; None for that of all ranks.

    Raises:
        SessionPoisoned: a rank did not arrive within `deadline_s`.
    """
    if not dist.is_initialized():
        return {} if failure is None else {0: failure}
    try:
        group = group or control_group(deadline_s)
        any_failed = torch.tensor([failure is not None], dtype=torch.int32, device="cpu")
        dist.all_reduce(any_failed, op=dist.ReduceOp.MAX, group=group)
        if not any_failed.item():
            return {}
        ranks = dist.get_process_group_ranks(group)
        texts: list[str | None] = [None] * len(ranks)
        dist.all_gather_object(texts, failure, group=group)
    except RuntimeError as lost:
        own_failure = "" if failure is None else f"; this rank failed itself: {failure}"
        raise poison(
            f"the ranks did not agree within {deadline_s:g} s ({lost}){own_failure}"
        ) from lost
    return {rank: text for rank, text in zip(ranks, texts, strict=True) if text is not None}


def control_group(deadline_s: float) -> Any:
    """Return a gloo group of all ranks; its operations time out after `deadline_s` seconds.

    The first call for a deadline is a collective over all ranks.
    """
    world = dist.group.WORLD
    made_under, group = _control.get(("all", deadline_s), (None, None))
    if made_under is not world:
        timeout = datetime.timedelta(seconds=deadline_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        _control["all", deadline_s] = (world, group)
    return group


@contextmanager
def as_one(consequence: str) -> Iterator[None]:
    """Raise on all ranks if the block raises on one rank. All ranks of WORLD enter.

    Other ranks raise at the next `meet`, at the latest at the end of the block. A nested
    block is part of the outer one. `consequence` is the end of the error message, which says what
    to do next.

    Raises:
        WindowAborted: another rank has failed.
    """
    if _session.as_one:
        yield
        return
    _session.as_one = True
    try:
        yield
        meet(consequence)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # neither SystemExit nor torch's CheckpointException is one
        if _session.as_one:
            with contextlib.suppress(WindowAborted):
                meet(consequence, error)
        raise
    finally:
        _session.as_one = False


@contextmanager
def as_one_at_barriers(consequence: str) -> Iterator[None]:
    """Raise on all ranks if the block raises on one, as `as_one` does at the end of the block. Here
    each `dist.barrier()` without arguments in the block also exchanges failures, by `meet`.
    """
    barrier = dist.barrier

    def met(*args: Any, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs) if args or kwargs else meet(consequence)

    dist.barrier = met
    try:
        with as_one(consequence):
            yield
    finally:
        dist.barrier = barrier


def meet(consequence: str, error: BaseException | None = None) -> None:
    """Raise `WindowAborted` on all ranks of an `as_one` block if any rank passes an error.
    A collective of all ranks. Outside such a block, raise `error` itself, if there is one.

    It uses the default group, because a rank that cannot open files cannot create another.
    """
    if not _session.as_one:
        if error is not None:
            raise error
        return
    own_text = None if error is None else describe(error)
    texts: list[str | None] = [own_text]
    if dist.is_initialized():
        texts *= dist.get_world_size()
        dist.all_gather_object(texts, own_text)
    failures = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failures:
        _session.as_one = False
        raise WindowAborted(failures, consequence) from error


@contextmanager
def attempt(consequence: str) -> Iterator[None]:
    """Raise on all ranks if the block raises `OSError` or `ValueError` on one of them.

    Ranks `meet` at the end of the block. Use it within `as_one`, around code that reads or writes
    files.
    """
    error = None
    try:
        yield
    except (OSError, ValueError) as failed:
        error = failed
    meet(consequence, error)


def compare(text: str, group: Any) -> list[str]:
    """Gather `text` from all ranks of a gloo group, and return the ranks' texts in rank order.
    Return [] if a rank did not arrive in time.
    """
    texts: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(texts, text, group=group)
    except RuntimeError:
        return []
    return texts


def lockstep_group() -> Any:
    """Return the gloo group of the ranks in this rank's tensor- and context-parallel group.

    The first call is a collective over all ranks, like that of `control_group`.
    """
    from megatron.core import parallel_state

    inner = parallel_state.get_tensor_and_context_parallel_group()
    return shared_group("lockstep", tuple(dist.get_process_group_ranks(inner)), LOCKSTEP_S)


def shared_group(name: str, key: object, deadline_s: float) -> Any:
    """Return a gloo group of all ranks that pass an equal `key`.
    The group is created once for each name and deadline.

    The first call is a collective over all ranks, like that of `control_group`.
    """
    world = dist.group.WORLD
    made_under, group = _control.get((name, deadline_s), (None, None))
    if made_under is not world:
        keys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(keys, key, group=control_group(DEADLINE_S))
        timeout = datetime.timedelta(seconds=deadline_s)
        for group_key in dict.fromkeys(keys):
            members = [rank for rank, rank_key in enumerate(keys) if rank_key == group_key]
            new_group = dist.new_group(members, backend="gloo", timeout=timeout)
            group = new_group if group_key == key else group
        _control[name, deadline_s] = (world, group)
    return group


def poison(reason: str) -> SessionPoisoned:
    """Refuse all further guarded windows of this process, because its ranks may have left a window
    at different points, for `reason`. Return the `SessionPoisoned` error to raise.
    """
    first = _heard_of()
    if _session.poisoned is None:
        _session.poisoned = reason
        # Best effort: a rank that died may have taken the store with it.
        with contextlib.suppress(RuntimeError, ValueError):
            store = distributed_c10d._get_default_store()
            store.compare_set(_key(), "", f"rank {dist.get_rank()}: {reason}")
    first_reason = "" if first is None or first.endswith(reason) else f" First heard of: {first}."
    return SessionPoisoned(f"{_session.poisoned}.{first_reason} {_remedy()}")


def is_poisoned() -> bool:
    """Return whether an earlier window of this process could not be finished."""
    return _session.poisoned is not None


def refuse_if_poisoned() -> None:
    """Raise `SessionPoisoned` if an earlier window of this process could not be finished."""
    if _session.poisoned is not None:
        raise SessionPoisoned(
            f"an earlier window was left half-way: {_session.poisoned}. {_remedy()}"
        )


def forget() -> None:
    """Destroy the gloo groups that this module created, and end the poisoned state.
    All ranks call it while they rebuild their process groups.
    """
    for made_under, group in _control.values():
        if made_under is dist.group.WORLD:
            dist.destroy_process_group(group)
    _control.clear()
    _session.poisoned = None
    _session.number += 1


def describe(error: BaseException) -> str:
    """Return an error's type and message in one text, as in the last line of a traceback."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _remedy() -> str:
    return (
        "Messages of that window may still be in flight. Call rebuild_process_groups(chunks) on "
        "all ranks, or start the processes again (docs/aborting.md)"
    )


def _heard_of() -> str | None:
    """Return the text that the first poisoned rank has written to torch's store: its rank number
    and the reason. Return None if no rank has written one, or the store is gone.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        store = distributed_c10d._get_default_store()
        if store.check([_key()]):
            return str(store.get(_key()).decode())
    return None


def _key() -> str:
    return f"megatron_idempotent/poisoned/{_session.number}"


@contextmanager
def collective_timeout(groups: Sequence[Any], timeout_s: float) -> Iterator[None]:
    """Lower the timeout of process groups' gloo operations to `timeout_s` in the block.
    Shorter timeouts stay.

    It changes nothing for NCCL, whose watchdog ends operations, and the process, after the timeout
    that a group was created with.
    """
    changed = []
    timeout = datetime.timedelta(seconds=timeout_s)
    for group in groups:
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            if type(backend).__name__ != "ProcessGroupGloo":
                continue
            earlier_timeout = backend.options._timeout
            if earlier_timeout > timeout:
                changed.append((backend, earlier_timeout))
                backend._set_default_timeout(timeout)
    try:
        yield
    finally:
        for backend, earlier_timeout in changed:
            backend._set_default_timeout(earlier_timeout)
