"""Exchanges the state of a step between ranks before any goes on: on the host, with a deadline.

A rank that would go on alone waits in a collective for ever, or trains on half of a step.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_idempotent.window.agreement import WindowAborted, control_group, describe, poison

Doing = Literal["chunk", "last", "finish", "divide", "updated", "abort"]

ListShape = tuple[int, int, int, int]
"""Microbatches of one call: how many, their largest rows and positions, and a checksum of all
shapes, 0 for rows of one shape."""

# Bytes of each rank in the first gather; those of a rank with dozens of metrics' rows are more.
_ROOM = 4096
_LENGTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Tells the other ranks how far this rank is in a step, and with what.

    Example: `RankStatus(doing="abort", step_id="3", updates=2)`.
    """

    doing: Doing
    step_id: str
    updates: int
    """The number of steps that this rank has finished; equal unless ranks left the last one."""
    failure: str | None = None
    """The error of this rank, if there was one."""
    partially_updated: bool = False
    """True if this rank has begun its update, and has no copy to go back to."""
    poisoned: bool = False
    """True if this rank has left collectives that others may be in."""
    begun: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The arguments that must be equal on all ranks that begin a step, by name."""
    replica: int = 0
    """Data-parallel rank; ranks of one replica are given the same batches."""
    lists: tuple[ListShape, ...] = ()
    """The microbatches of the batch, one entry per call."""
    specs: tuple[tuple[Any, tuple[int, int]], ...] = ()
    """Per entry of `lists` a microbatch's `spec` and shape, of which other ranks make dummies."""
    bins: int = 0
    """The number of packs that the batch becomes within the budget of tokens; 0 without one."""
    shift: int | None = None
    """The exponent of the power of two that losses are to be divided by; None without a batch."""
    counts: tuple[float, float] = (0.0, 0.0)
    """Valid sequences and tokens, on the reporting rank of each replica; else zeros."""
    groups: tuple[int, ...] = ()
    """Ids of groups with valid sequences, on the reporting rank of each replica; else none."""
    rows: tuple[Mapping[str, float], ...] = ()
    """Metrics of each microbatch, not normalised, on ranks that have the loss."""
    bad_parameter: str | None = None
    """A trained parameter of this rank that is NaN or infinite, if there is one."""
    rates: tuple[float, float] | None = None
    """Learning rate and weight decay; None on a rank that trains no parameter."""


class LocalFailure(Exception):
    """Says that this rank failed, and did all that others wait for; `error` is the failure."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def all_gather_status(say: RankStatus, deadline_s: float, group: Any = None) -> list[RankStatus]:
    """Returns the status of all ranks of the group, by rank. A collective: one gather on the host.

    A second gather follows if any status is longer than a few kilobytes. `group` is a gloo group
    whose operations end after `deadline_s`, in seconds; None for that of all ranks.

    Raises:
        SessionPoisoned: a rank did not come in time, or says that it is poisoned.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [say]
    try:
        # As a dictionary: where this class arrived pickled by value, as in some Ray actors, plain
        # pickle does not find it under its name.
        plain = {field.name: getattr(say, field.name) for field in dataclasses.fields(say)}
        said = _gathered(pickle.dumps(plain), group or control_group(deadline_s))
        heard = [RankStatus(**pickle.loads(each)) for each in said]
    except RuntimeError as lost:
        own = "" if say.failure is None else f"; this rank failed itself: {say.failure}"
        raise poison(
            f"not all ranks came to {say.doing} of step {say.step_id!r} within {deadline_s:g} s "
            f"({lost}){own}"
        ) from lost
    except BaseException as error:
        # Peers go on, or are in a second gather and would take our next one for it.
        poison(f"a rank left the agreement on step {say.step_id!r} by {describe(error)}")
        raise
    left = [f"{rank}: {each.failure}" for rank, each in enumerate(heard) if each.poisoned]
    if left:
        raise poison(f"collectives were left on rank {'; on rank '.join(left)}")
    return heard


def _gathered(message: bytes, group: Any) -> list[bytes]:
    """Returns each rank's message, whatever their lengths. A collective."""
    start = len(message).to_bytes(_LENGTH, "little") + message[: _ROOM - _LENGTH]
    everybody = _gathered_evenly(start, _ROOM, group)
    lengths = [int.from_bytes(each[:_LENGTH], "little") for each in everybody]
    longest = max(lengths)
    if longest > _ROOM - _LENGTH:
        everybody = _gathered_evenly(message, longest, group)
        return [each[:length] for each, length in zip(everybody, lengths, strict=True)]
    both = zip(everybody, lengths, strict=True)
    return [each[_LENGTH : _LENGTH + length] for each, length in both]


def _gathered_evenly(message: bytes, size: int, group: Any) -> list[bytes]:
    own = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    shape = dist.get_world_size(group), size
    everybody = list(torch.empty(shape, dtype=torch.uint8, device="cpu"))
    dist.all_gather(everybody, own, group=group)
    return [each.numpy().tobytes() for each in everybody]


def failures(said: Sequence[RankStatus], group: Any = None) -> dict[int, str]:
    """Returns what stops the step, by global rank: failures, aborts, ranks in another step.

    `group` is the group whose ranks said it, None for all ranks.
    """
    ids = {say.step_id for say in said}
    updates = {say.updates for say in said}
    found = {}
    ranks = list(range(len(said)) if group is None else dist.get_process_group_ranks(group))
    begun_otherwise = _begun_otherwise(said, ranks)
    for rank, say in zip(ranks, said, strict=True):
        if say.failure is not None:
            found[rank] = say.failure
        elif say.doing == "abort":
            found[rank] = "abort() was called"
        elif len(ids) > 1:
            found[rank] = f"is in step {say.step_id!r}"
        elif len(updates) > 1:
            found[rank] = (
                f"has made {say.updates} updates, others {sorted(updates - {say.updates})}: load a "
                "checkpoint on all ranks and make a new TrainStep"
            )
        elif rank in begun_otherwise:
            found[rank] = begun_otherwise[rank]
    return found


def begun_alike(said: Sequence[RankStatus]) -> bool:
    """Returns whether ranks that are in one step began it with the same arguments."""
    return not _begun_otherwise(said, range(len(said)))


def _begun_otherwise(said: Sequence[RankStatus], ranks: Sequence[int]) -> dict[int, str]:
    first: dict[str, tuple[int, str]] = {}
    told: dict[int, list[str]] = {}
    for rank, say in zip(ranks, said, strict=True):
        for name, value in say.begun.items():
            where, theirs = first.setdefault(name, (rank, value))
            if value != theirs:
                told.setdefault(rank, []).append(f"{name}={value} where rank {where} has {theirs}")
    return {rank: f"the step has {'; '.join(each)}" for rank, each in told.items()}


def stop(found: Mapping[int, str], consequence: str, cause: BaseException | None) -> None:
    """Raise `WindowAborted`, on all ranks alike, if there are failures."""
    if found:
        raise WindowAborted(found, consequence) from cause
