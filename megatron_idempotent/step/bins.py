"""Puts sequences into few bins of even work, each within a budget of tokens.

Legend: n sequences, k bins.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from megatron_idempotent.fp8.packing import TokenAlignment

Bins = tuple[tuple[int, ...], ...]
"""The indices of each bin's sequences, in rising order; the bin with most work comes first."""

NO_ALIGNMENT = TokenAlignment(sequence=1, pack=1)


def bin_sequences(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    alignment: TokenAlignment = NO_ALIGNMENT,
    bins: int = 1,
    multiple: int = 1,
    attention: float = 0.0,
) -> Bins:
    """Put sequences into few bins of at most `max_tokens` each, with even work.

    The same lengths give the same bins on every rank and machine. Ranks that meet in each
    microbatch agree on the largest of their numbers of bins, and call again with it as `bins`. The
    bin with most work comes first, so that ranks have about the same work in each microbatch.

    Args:
        lengths: [n], tokens of each sequence, without padding.
        max_tokens: the most that a bin may hold, padding included.
        alignment: what sequences and packs are padded to, as `token_alignment` says.
        bins: the least number of bins; some are empty where there are fewer sequences.
        multiple: the number of bins is a multiple of it, as interleaved pipelines need.
        attention: work that a token adds for each token of its sequence; its other work counts as
            1. About 1 / (6 · hidden size) for a transformer; 0 to count tokens alone.

    Returns:
        The indices of each bin's sequences; no bins without sequences, unless `bins` is 2 or more.

    Raises:
        ValueError: a sequence takes more than `max_tokens`, a length is negative, or a number is
            not a positive int (`bins` may be 0).

    Example:
        for bin in bin_sequences([len(each) for each in sequences], 4096, alignment=alignment):
            pack = Pack.of([len(sequences[index]) for index in bin], alignment)
    """
    for name, value in (("max_tokens", max_tokens), ("bins", bins), ("multiple", multiple)):
        if type(value) is not int or value < (0 if name == "bins" else 1):
            raise ValueError(f"bin_sequences() takes a positive int as {name}, got {value!r}")
    capacity = capacity_of(max_tokens, alignment)
    sizes = [alignment.of_sequence(length) for length in lengths]
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        if length < 0 or size > capacity:
            raise ValueError(_told(index, length, size, max_tokens, capacity))
    if not sizes and bins < 2:
        return ()
    work = [size * (1 + attention * size) for size in sizes]
    # The longest first: what comes last fills gaps. Of equals the first, so that ranks agree.
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    tight = _tightly(order, sizes, capacity)
    least = max(-(-sum(sizes) // capacity), bins, 1)
    wanted = {-(-number // multiple) * multiple for number in (least, max(len(tight), least))}
    found: list[list[int]] | None = None
    for number in sorted(wanted):
        found = _evenly(order, sizes, work, number, capacity)
        if found is not None:
            break
    if found is None:
        found = tight + [[] for _ in range(max(wanted) - len(tight))]
    filled = [tuple(sorted(each)) for each in found]
    filled.sort(key=lambda each: (-sum(work[index] for index in each), each))
    return tuple(filled)


def capacity_of(max_tokens: int, alignment: TokenAlignment) -> int:
    """Returns the tokens that a pack of at most `max_tokens` can have.

    Raises:
        ValueError: `max_tokens` is less than the smallest pack takes.
    """
    capacity = max_tokens - max_tokens % alignment.pack
    if not capacity:
        raise ValueError(
            f"a budget of {max_tokens} tokens, and packs are multiples of {alignment.pack} tokens "
            f"on these ranks: give at least {alignment.pack}"
        )
    return capacity


def _told(index: int, length: int, size: int, max_tokens: int, capacity: int) -> str:
    if length < 0:
        return f"sequence {index} has length {length}: give lengths of 0 or more"
    padded = f", {size} with its padding," if size != length else ""
    usable = f", of which {capacity} can be used" if capacity != max_tokens else ""
    return (
        f"sequence {index} has {length} tokens{padded} and a bin at most {max_tokens}{usable}: "
        "raise the budget, or cut the sequence"
    )


def _evenly(
    order: Sequence[int],
    sizes: Sequence[int],
    work: Sequence[float],
    number: int,
    capacity: int,
) -> list[list[int]] | None:
    """Puts each sequence into the bin with least work that has room; None if no bin has room."""
    bins: list[list[int]] = [[] for _ in range(number)]
    rooms = [capacity] * number
    heap = [(0.0, place) for place in range(number)]
    for index in order:
        full = []
        while heap and rooms[heap[0][1]] < sizes[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, place = heap[0]
        bins[place].append(index)
        rooms[place] -= sizes[index]
        heapq.heapreplace(heap, (load + work[index], place))
        for each in full:
            heapq.heappush(heap, each)
    return bins


def _tightly(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each sequence into the fullest bin that has room for it: close to the fewest bins."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in order:
        at = bisect_left(rooms, (sizes[index], -1))
        if at == len(rooms):
            bins.append([])
            room, place = capacity, len(bins) - 1
        else:
            room, place = rooms.pop(at)
        bins[place].append(index)
        insort(rooms, (room - sizes[index], place))
    return bins
