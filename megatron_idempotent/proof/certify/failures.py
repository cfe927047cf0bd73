"""Draws the ranks, calls and microbatches at which steps fail, and runs such steps.

With any seed each rank fails in some step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from .draws import CALLS
from .protocol import MICRO_BATCH, Finished, Planted, Rows, Wrong

if TYPE_CHECKING:
    from .bench import Bench


def or_aborted(
    bench: Bench, rows_of_calls: Sequence[Rows], **options: Any
) -> tuple[str | None, Finished | None]:
    """Run one step of the adapter; if the step raises, call the adapter's `abort()`. Return (None,
    the step's `Finished`), or (the error's first line, None).

    `options` are those of `Bench.drive`.
    """
    from megatron_idempotent.window.agreement import describe

    try:
        finished = bench.drive(rows_of_calls, **options)
    except BaseException as error:
        bench.adapter.abort()
        if isinstance(error, Wrong) or not isinstance(error, (Exception, Planted)):
            raise
        return describe(error).splitlines()[0], None
    return None, bench.checked(finished)


_Phase = Literal["loss", "forward", "backward"]
#: Ranges of the index of the call that fails: the first, one of the next three, a later one.
SPANS = ((0, 0), (1, 3), (4, CALLS - 1))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Says where a step is made to fail: in which of its calls, and at which microbatch."""

    sizes: tuple[int, ...]
    """Microbatches of each call."""
    call: int
    microbatch: int
    """The number of the call's microbatches before the one that fails; one or more."""

    @classmethod
    def drawn(cls, bench: Bench, span: tuple[int, int]) -> Point:
        """Draw a `Point`: a random call with an index in the range `span`, one of that call's
        microbatches, and the number of microbatches of each call of the step.
        """
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
    """Describes a failure to inject into a step: the ranks, the phase, the microbatch, the error
    type.
    """

    ranks: tuple[int, ...]
    phase: _Phase
    error: type[BaseException]
    point: Point

    def __str__(self) -> str:
        # A loss fails in the first microbatch of a call, as adapters have it.
        number = 1 if self.phase == "loss" else self.point.microbatch + 1
        return (
            f"the {self.phase} of microbatch {number} {self.point} failed on rank "
            f"{', '.join(map(str, self.ranks))} with a {self.error.__name__}"
        )


def failures(bench: Bench) -> list[Failure]:
    """Draw the failures that a check injects, one for each step. Each rank that computes the loss
    gets at least one failure in the loss. If `bench.fails_within_model`, some forwards and
    backwards fail too, on all ranks of one replica's pipeline stage.

    Errors are of types that frameworks catch, such as those of missing memory or a bad sample; in
    the model also of types that end a process or a task.
    """
    from asyncio import CancelledError

    import torch

    errors = (torch.OutOfMemoryError, ValueError, KeyError, MemoryError, AssertionError)
    interrupts = (KeyboardInterrupt, SystemExit, CancelledError)
    draw, times = bench.draw, 3 if bench.thorough else 1
    ranks_of: dict[tuple[int, int], list[int]] = {}
    losses = []
    for rank, (replica, stage, last) in enumerate(bench.gather(bench.coordinates)):
        ranks_of.setdefault((replica, stage), []).append(rank)
        losses += [[rank]] if last else []
    number = max(len(errors), len(losses)) * times
    kinds: list[Any] = [("loss", error) for error in draw.dealt(errors, number)]
    ranks = draw.dealt(losses, number)
    if bench.fails_within_model:
        for _ in range(times):
            first, second = draw.shuffled(errors[1:])[:2]
            kinds += [("forward", first), ("backward", errors[0]), ("backward", second)]
            if bench.layout.stages == 1:  # other stages would wait until the process ends
                phase = draw.shuffled(("forward", "backward"))[0]
                kinds.append((phase, draw.shuffled(interrupts)[0]))
        ranks += draw.dealt(list(ranks_of.values()), len(kinds) - number)
    # A framework that cannot drop an open step keeps its earlier calls: fail in the first.
    spans = SPANS[:1] if bench.declares("abort-and-retry") else SPANS
    drawn = [
        Failure(
            ranks=tuple(failing_ranks), phase=phase, error=error, point=Point.drawn(bench, span)
        )
        for failing_ranks, (phase, error), span in zip(
            ranks, kinds, draw.dealt(spans, len(kinds)), strict=True
        )
    ]
    # Interrupts last: a process that is told to end may take no further step.
    return sorted(draw.shuffled(drawn), key=lambda failure: failure.error in interrupts)


def fail(bench: Bench, failure: Failure) -> None:
    """Run a step with `failure` injected; raise `Wrong` if a rank finishes the step, or if a
    parameter changes. If the failure never occurred, because the adapter runs other microbatches
    than were planned for, raise `Wrong` unless the step is right.
    """
    seed = bench.draw.number(1, 10**5)
    point = failure.point
    calls_of = bench.alike(seed, *(MICRO_BATCH * size for size in point.sizes))
    rows_of_calls = calls_of(bench.replica)
    fails = bench.rank in failure.ranks
    Planted.drawn = failure.error
    if failure.phase == "loss":
        failing_call = point.call if fails else None
        raised, finished = or_aborted(bench, rows_of_calls, failing_call=failing_call)
        has_failed = fails
    else:
        forwards_done = sum(point.sizes[: point.call]) + point.microbatch
        with bench.forwards.failing(forwards_done if fails else None, failure.phase):
            raised, finished = or_aborted(bench, rows_of_calls)
        has_failed = bench.forwards.has_failed
    outcomes = bench.gather((raised, has_failed))
    nobody_raised = all(error is None for error, _ in outcomes)
    fails_again = failure.phase == "loss" and any(has_failed for _, has_failed in outcomes)
    if finished is not None and nobody_raised and not fails_again:
        # The adapter runs other microbatches, or does not call the chunk's forward, or has run the
        # failed forward a second time. A loss that is to fail does so each time.
        try:
            bench.expect(finished, calls_of)
        except Wrong as wrong:
            raise Wrong(f"{failure} (nothing raised): {wrong}") from None
        return
    calm = [rank for rank, (error, _) in enumerate(outcomes) if error is None]
    if calm:
        cause = next(
            (outcomes[rank][0] for rank in failure.ranks if outcomes[rank][0]), "nothing raised"
        )
        raise Wrong(f"{failure} ({cause}), and rank {calm[0]} finished the step")
    bench.unchanged(f"a step in which {failure}")
