"""Deals out failures over ranks, calls and microbatches, and takes steps that fail so.

Whatever the seed, each rank fails in some step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from .draws import CALLS
from .protocol import MICRO_BATCH, Finished, Planted, Wrong

if TYPE_CHECKING:
    from .bench import Bench


def or_aborted(bench: Bench, step: Callable[[], Finished]) -> tuple[str | None, Finished | None]:
    """Return what a step raised on this rank, which then aborts it, or what it returned."""
    from megatron_idempotent.window.agreement import describe

    try:
        finished = step()
    except BaseException as error:
        bench.adapter.abort()
        if isinstance(error, Wrong) or not isinstance(error, (Exception, Planted)):
            raise
        return describe(error).splitlines()[0], None
    return None, bench.checked(finished)


_Where = Literal["loss", "forward", "backward"]
#: The calls of a step in which something goes wrong: the first, one of few, one of many.
SPANS = ((0, 0), (1, 3), (4, CALLS - 1))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Says where something goes wrong in a step."""

    sizes: tuple[int, ...]
    """Microbatches of each call."""
    call: int
    microbatch: int
    """Microbatches of the call before it; one or more."""

    @classmethod
    def drawn(cls, bench: Bench, span: tuple[int, int]) -> Place:
        """Draw a call of a span, the calls of its step, and a microbatch."""
        draw, multiple = bench.draw, bench.multiple
        call = draw.number(*span)
        calls = draw.number(call + 1, min(call + 2, CALLS)) if call else 1
        sizes = [multiple] * calls
        sizes[call] = max(2, multiple * draw.number(1, 3))
        return cls(
            sizes=tuple(sizes), call=call, microbatch=draw.number(1, max(1, sizes[call] - 1))
        )

    def __str__(self) -> str:
        return f"in call {self.call + 1} of {len(self.sizes)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Says where a step fails."""

    ranks: tuple[int, ...]
    where: _Where
    error: type[BaseException]
    place: Place

    def __str__(self) -> str:
        # A loss fails in the first microbatch of a call, as adapters have it.
        number = 1 if self.where == "loss" else self.place.microbatch + 1
        return (
            f"the {self.where} of microbatch {number} {self.place} failed on rank "
            f"{', '.join(map(str, self.ranks))} with a {self.error.__name__}"
        )


def failures(bench: Bench) -> list[Failure]:
    """Deal out failures: of the loss on each rank that has one, and in the model on others too.

    Errors are of types that frameworks catch, as a lack of memory or a bad sample; in the model
    also of those that end a process or a task.
    """
    from asyncio import CancelledError

    import torch

    errors = (torch.OutOfMemoryError, ValueError, KeyError, MemoryError, AssertionError)
    interrupts = (KeyboardInterrupt, SystemExit, CancelledError)
    draw, times = bench.draw, 3 if bench.thorough else 1
    places: dict[tuple[int, int], list[int]] = {}
    losses = []
    for rank, (replica, stage, last) in enumerate(bench.told_by_all(bench.seat)):
        places.setdefault((replica, stage), []).append(rank)
        losses += [[rank]] if last else []
    number = max(len(errors), len(losses)) * times
    kinds: list[Any] = [("loss", error) for error in draw.dealt(errors, number)]
    ranks = draw.dealt(losses, number)
    if bench.fails_within_model:
        for _ in range(times):
            first, second = draw.shuffled(errors[1:])[:2]
            kinds += [("forward", first), ("backward", errors[0]), ("backward", second)]
            if bench.layout.stages == 1:  # else other stages wait until the process has ended
                where = draw.shuffled(("forward", "backward"))[0]
                kinds.append((where, draw.shuffled(interrupts)[0]))
        ranks += draw.dealt(list(places.values()), len(kinds) - number)
    # A framework that drops no open step keeps a step's earlier calls.
    spans = SPANS[:1] if bench.declares("abort-and-retry") else SPANS
    drawn = [
        Failure(ranks=tuple(at), where=where, error=error, place=Place.drawn(bench, span))
        for at, (where, error), span in zip(
            ranks, kinds, draw.dealt(spans, len(kinds)), strict=True
        )
    ]
    # After the others, because a process that is told to end may take no further step.
    return sorted(draw.shuffled(drawn), key=lambda failure: failure.error in interrupts)


def fail(bench: Bench, failure: Failure) -> None:
    """Take a step that fails so, and hold all ranks to raising and to dropping it."""
    adapter = bench.adapter
    seed = bench.draw.number(1, 10**5)
    place = failure.place
    calls_of = bench.alike(seed, *(MICRO_BATCH * size for size in place.sizes))
    fails = bench.rank in failure.ranks
    Planted.drawn = failure.error

    def step() -> Finished:
        adapter.begin()
        for call, rows in enumerate(calls_of(bench.replica)):
            loss = fails and failure.where == "loss" and call == place.call
            adapter.microbatch(rows, fail=loss)
        return adapter.finish()

    if failure.where == "loss":
        raised, finished = or_aborted(bench, step)
        met = fails
    else:
        before = sum(place.sizes[: place.call]) + place.microbatch
        with bench.forwards.failing(before if fails else None, failure.where):
            raised, finished = or_aborted(bench, step)
        met = bench.forwards.met
    told = bench.told_by_all((raised, met))
    nobody_raised = all(each is None for each, _ in told)
    fails_again = failure.where == "loss" and any(met for _, met in told)
    if finished is not None and nobody_raised and not fails_again:
        # The adapter runs other microbatches, or none by the chunk's own forward, or has run again
        # what had failed once: a loss that is to fail does so each time.
        try:
            bench.expect(finished, bench.everybody(calls_of))
        except Wrong as wrong:
            raise Wrong(f"{failure} (nothing raised): {wrong}") from None
        return
    calm = [rank for rank, (each, _) in enumerate(told) if each is None]
    if calm:
        said = next((told[rank][0] for rank in failure.ranks if told[rank][0]), "nothing raised")
        raise Wrong(f"{failure} ({said}), and rank {calm[0]} finished the step")
    bench.unchanged(f"a step in which {failure}")
