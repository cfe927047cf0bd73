"""Draws the sizes, masks and failures of a check from a seed, the same on all ranks.

What each run has to have is dealt out, and only its order and the rest are drawn: whatever the
seed, a step has a call of nine microbatches and one of one, and each rank fails in some step.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .protocol import MICRO_BATCH, Calls, Finished, Wrong

if TYPE_CHECKING:
    from .bench import Bench

#: The most calls of a step, and microbatches of a call.
CALLS, MICROBATCHES = 7, 9
Each = TypeVar("Each")


class Draw:
    """Draws from a seed and the names of what is drawn for.

    Example: `Draw(7, "dp2", "drawn-sizes").shuffled([1, 2, 3])`.
    """

    def __init__(self, seed: int, *names: str) -> None:
        """Take a seed, and what else tells one sequence of draws from another."""
        self._random = random.Random(" ".join((str(seed), *names)))

    def number(self, least: int, most: int) -> int:
        """Return a whole number from `least` to `most`."""
        return self._random.randint(least, most)

    def share(self, least: float, most: float) -> float:
        """Return a number between the two."""
        return self._random.uniform(least, most)

    def shuffled(self, values: Sequence[Each]) -> list[Each]:
        """Return the values in any order."""
        return self._random.sample(list(values), len(values))

    def dealt(self, values: Sequence[Each], number: int) -> list[Each]:
        """Return so many of the values, each as often as any other, give or take one."""
        found: list[Each] = []
        while len(found) < number:
            found += self.shuffled(values)
        return found[:number]

    def sizes(self, calls: int, multiple: int = 1, *, most: int = MICROBATCHES) -> list[int]:
        """Return the microbatches of each call, odd and even, in any order.

        Of CALLS calls one has one, and one has MICROBATCHES. All are a multiple of `multiple`, as
        an interleaved schedule takes them.
        """
        found = [self.number(1, most if calls < 3 else min(most, 3)) for _ in range(calls)]
        if calls == CALLS:
            found[:4] = 1, MICROBATCHES, 2, self.number(1, 2) * 2 + 1
        if multiple > 1:
            largest = MICROBATCHES // multiple * multiple
            found = [min(largest, -(-size // multiple) * multiple) for size in found]
        return self.shuffled(found)


def alike(bench: Bench, seed: int, *numbers: int) -> Calls:
    """Make a call of so many rows for each number, the same numbers in all replicas."""
    return lambda replica: [
        bench.rows(replica, 10 * seed + call, number) for call, number in enumerate(numbers)
    ]


def or_aborted(bench: Bench, step: Callable[[], Finished]) -> tuple[str | None, Finished | None]:
    """Return what a step raised on this rank, which then aborts it, or what it returned."""
    from megatron_idempotent.window.agreement import describe

    try:
        return None, step()
    except Wrong:
        bench.adapter.abort()
        raise
    except Exception as error:  # noqa: BLE001  it is what is asked for
        bench.adapter.abort()
        return describe(error).splitlines()[0], None


_Where = Literal["loss", "forward", "backward"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Says where a step fails."""

    ranks: tuple[int, ...]
    where: _Where
    sizes: tuple[int, ...]
    """Microbatches of each call."""
    call: int
    microbatch: int
    """Microbatches of the call before the one that fails."""

    def __str__(self) -> str:
        place = f"of microbatch {self.microbatch + 1} in call {self.call + 1} of {len(self.sizes)}"
        return f"the {self.where} {place} failed on rank {', '.join(map(str, self.ranks))}"


def failures(bench: Bench) -> list[Failure]:
    """Deal out failures: of the loss on each rank that has one, and in the model on others too."""
    draw, times = bench.draw, 3 if bench.thorough else 1
    places: dict[tuple[int, int], list[int]] = {}
    losses = []
    for rank, (replica, stage, last) in enumerate(bench.told_by_all(bench.seat)):
        places.setdefault((replica, stage), []).append(rank)
        losses += [rank] if last else []
    # A framework that drops no open step keeps a step's earlier calls.
    keeps = bench.declares("abort-and-retry")
    number = max(2, len(losses)) * times
    ranks = draw.dealt(losses, number)
    found = [
        _drawn(bench, [rank], "loss", later_call=later and not keeps)
        for rank, later in zip(ranks, draw.dealt((True, False), number), strict=True)
    ]
    if bench.fails_within_model:
        kinds: list[Any] = draw.dealt(("forward", "backward"), max(2, len(places) // 2) * times)
        found += [
            _drawn(bench, place, kind, later_call=later and not keeps)
            for kind, place, later in zip(
                kinds,
                draw.dealt(list(places.values()), len(kinds)),
                draw.dealt((True, False), len(kinds)),
                strict=True,
            )
        ]
    return draw.shuffled(found)


def _drawn(bench: Bench, ranks: Sequence[int], where: _Where, *, later_call: bool) -> Failure:
    """Draw the sizes of a step that fails, and in which microbatch.

    A loss fails in the first one of a call, as adapters have it, and a model after others.
    """
    draw = bench.draw
    calls = draw.number(2, 4) if later_call else 1
    sizes = [max(2, each) for each in draw.sizes(calls, bench.multiple, most=3)]
    call = draw.number(1, calls - 1) if later_call else 0
    return Failure(
        ranks=tuple(ranks),
        where=where,
        sizes=tuple(sizes),
        call=call,
        microbatch=0 if where == "loss" else draw.number(1, sizes[call] - 1),
    )


def fail(bench: Bench, failure: Failure) -> None:
    """Take a step that fails so, and hold all ranks to raising and to dropping it."""
    adapter = bench.adapter
    seed = bench.draw.number(1, 10**5)
    calls_of = alike(bench, seed, *(MICRO_BATCH * size for size in failure.sizes))
    fails = bench.rank in failure.ranks

    def step() -> Finished:
        adapter.begin()
        for call, rows in enumerate(calls_of(bench.replica)):
            loss = fails and failure.where == "loss" and call == failure.call
            adapter.microbatch(rows, fail=loss)
        return adapter.finish()

    if failure.where == "loss":
        raised, finished = or_aborted(bench, step)
        met = fails
    else:
        before = sum(failure.sizes[: failure.call]) + failure.microbatch
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
    bench.unchanged("a step that failed")
