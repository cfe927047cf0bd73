"""Exchanges what each rank is about to run, and plans the calls that ranks then make together.

A step of one rank alone calls no function of this file.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_idempotent.window.agreement import control_group, describe, poison

from .dummies import dummy
from .microbatches import Calls, CallShape, Microbatch, Shape

Phase = Literal["batch", "last", "finish", "divide", "updated", "abort"]

# Bytes of each rank in the first gather. With the metrics of dozens of microbatches they are more.
_FIRST_BYTES = 4096
_HEADER_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Holds the message that a rank sends to the others: its phase in the step, its failure, its
    counts, and the batch that it will run next.

    Example: `RankStatus(phase="abort", step_id="3", updates=2)`.
    """

    phase: Phase
    step_id: str
    updates: int
    """The number of steps that this rank has finished; equal unless ranks left the last one."""
    failure: str | None = None
    """The error of this rank, if there was one."""
    partially_updated: bool = False
    """True if this rank has begun its update, and has no copy to restore."""
    poisoned: bool = False
    """True if this rank has left collectives that others may be in."""
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The arguments that must be equal on all ranks, by name."""
    replica: int = 0
    """Data-parallel rank; ranks of one replica are given the same batches."""
    calls: tuple[CallShape, ...] = ()
    """The shape of each call that the batch becomes."""
    templates: tuple[tuple[Any, Shape], ...] = ()
    """Per call a microbatch's `template` and shape, of which other ranks make dummies."""
    packs: int = 0
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


def all_gather_status(status: RankStatus, deadline_s: float, group: Any = None) -> list[RankStatus]:
    """Gather the status of all ranks of the group, by rank. A collective, on the host.

    A second gather follows if any status is longer than a few kilobytes. `group` is a gloo group
    whose operations end after `deadline_s`, in seconds; None for that of all ranks.

    Raises:
        SessionPoisoned: a rank did not come in time, or says that it is poisoned.
    """
    try:
        # As a dictionary: where this class arrived pickled by value, as in some Ray actors, plain
        # pickle does not find it under its name.
        fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
        messages = _all_gather_bytes(pickle.dumps(fields), group or control_group(deadline_s))
        statuses = [RankStatus(**pickle.loads(message)) for message in messages]
    except RuntimeError as error:
        failure = "" if status.failure is None else f"; this rank failed itself: {status.failure}"
        raise poison(
            f"not all ranks came to {status.phase} of step {status.step_id!r} within "
            f"{deadline_s:g} s ({error}){failure}"
        ) from error
    except BaseException as error:
        # Peers go on, or are in a second gather and would take our next one for it.
        poison(f"a rank left the agreement on step {status.step_id!r} by {describe(error)}")
        raise
    poisoned = [f"{rank}: {peer.failure}" for rank, peer in enumerate(statuses) if peer.poisoned]
    if poisoned:
        raise poison(f"collectives were left on rank {'; on rank '.join(poisoned)}")
    return statuses


def _all_gather_bytes(message: bytes, group: Any) -> list[bytes]:
    """Return each rank's message, whatever their lengths. A collective."""
    header = len(message).to_bytes(_HEADER_BYTES, "little")
    firsts = _all_gather_padded(
        header + message[: _FIRST_BYTES - _HEADER_BYTES], _FIRST_BYTES, group
    )
    lengths = [int.from_bytes(first[:_HEADER_BYTES], "little") for first in firsts]
    longest = max(lengths)
    if longest > _FIRST_BYTES - _HEADER_BYTES:
        messages = _all_gather_padded(message, longest, group)
    else:
        messages = [first[_HEADER_BYTES:] for first in firsts]
    return [message[:length] for message, length in zip(messages, lengths, strict=True)]


def _all_gather_padded(message: bytes, size: int, group: Any) -> list[bytes]:
    """Return each rank's message, by rank, padded with zeros to `size` bytes. A collective."""
    own_bytes = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    shape = dist.get_world_size(group), size
    by_rank = list(torch.empty(shape, dtype=torch.uint8, device="cpu"))
    dist.all_gather(by_rank, own_bytes, group=group)
    return [row.numpy().tobytes() for row in by_rank]


def differing_replicas(statuses: Sequence[RankStatus]) -> str | None:
    """Return a sentence if ranks of one replica were given different batches; else None."""
    first_of: dict[int, RankStatus] = {}
    for status in statuses:
        first = first_of.setdefault(status.replica, status)
        if (status.phase, status.calls) != (first.phase, first.calls):
            return (
                f"data-parallel rank {status.replica} was given {_describe_batch(first)} on one of "
                f"its model parallel ranks and {_describe_batch(status)} on another; give all of "
                "them the same batch"
            )
    return None


def _describe_batch(status: RankStatus) -> str:
    shapes = ", ".join(
        f"{number} microbatches of {'up to ' if checksum else ''}{rows} x {positions}"
        + (f" (shapes and lengths {checksum:08x})" if checksum else "")
        for number, rows, positions, checksum in status.calls
    )
    return f"{status.phase}({shapes or 'nothing'})"


def calls_in_lockstep(
    calls: Calls, statuses: Sequence[RankStatus], device: object
) -> Iterator[tuple[Sequence[Microbatch], bool]]:
    """Yield the schedule calls that this rank makes so that they match those of the other ranks in
    `statuses`. Each item is (microbatches, whether these are dummies).

    Ranks that share a model's collectives make calls of the same sizes in the same order: up to
    the fewest microbatches that a rank has, up to the second fewest, and so on. A rank that ran
    out sends dummy microbatches through its model, shaped like those of the fullest rank.
    """
    for index in range(max(len(status.calls) for status in statuses)):
        numbers = [
            status.calls[index][0] if index < len(status.calls) else 0 for status in statuses
        ]
        fullest = statuses[numbers.index(max(numbers))]
        microbatches = calls[index] if index < len(calls) else ()
        start = 0
        for end in sorted(set(numbers) - {0}):
            if start < len(microbatches):
                yield microbatches[start:end], False
            else:
                description, shape = fullest.templates[index]
                dummies = [
                    Microbatch(inputs=dummy(description, device), shape=shape)
                    for _ in range(end - start)
                ]
                yield dummies, True
            start = end
