"""Plans the microbatches that ranks run together if some have more of them than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .batch import ghost
from .records import Batch
from .talk import Say


def calls(
    lists: Sequence[Sequence[Batch]], said: Sequence[Say], device: object
) -> Iterator[tuple[list[Batch], bool]]:
    """The calls that this rank makes, and whether their microbatches are dummies.

    Ranks that share a model's collectives make calls of the same sizes in the same order: up to
    the fewest microbatches that a rank has, up to the second fewest, and so on. A rank that ran
    out sends dummy microbatches through its model, shaped like those of the fullest rank.
    """
    if not said:
        for microbatches in lists:
            yield list(microbatches), False
        return
    for place in range(max(len(say.lists) for say in said)):
        numbers = [say.lists[place][0] if place < len(say.lists) else 0 for say in said]
        fullest = said[numbers.index(max(numbers))]
        mine = lists[place] if place < len(lists) else []
        done = 0
        for number in sorted(set(numbers) - {0}):
            if done < len(mine):
                yield list(mine[done:number]), False
            else:
                example = fullest.specs[place]
                yield [ghost(example, device) for _ in range(number - done)], True
            done = number


def differing_replicas(said: Sequence[Say]) -> str | None:
    """Describes the difference if ranks of one replica were given different batches; else None."""
    first: dict[int, Say] = {}
    for say in said:
        other = first.setdefault(say.replica, say)
        if (say.doing, say.lists) != (other.doing, other.lists):
            return (
                f"data-parallel rank {say.replica} was given {_told(other)} on one of its model "
                f"parallel ranks and {_told(say)} on another; give all of them the same batch"
            )
    return None


def _told(say: Say) -> str:
    shapes = ", ".join(f"{n} microbatches of {rows} x {t}" for n, rows, t in say.lists)
    return f"{say.doing}({shapes or 'nothing'})"
