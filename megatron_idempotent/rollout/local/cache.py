"""Keys and values of a batch whose rows come and go.

Shapes: R rows there is room for, B rows in use (the first ones), H heads of keys and values,
C positions there is room for, P positions that were prefilled, D head size, U sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

#: Positions that a row has room for at first.
_POSITIONS = 64


class RowCache(Cache):
    """A cache in which each row has its own length, from position 0 on.

    One forward gives every row one more position. Rows join after the others and leave without
    the others being computed again: the last ones move into the gaps. After its length a row
    holds zeros, or what it wrote there itself: another row's NaN would come through the mask.
    """

    def __init__(self, *, layers: int) -> None:
        self._places = _Places()
        self._of_layer = [_RowLayer(self._places) for _ in range(layers)]
        super().__init__(layers=[*self._of_layer])

    @property
    def rows(self) -> int:
        """The number of rows in use."""
        return self._places.rows

    @property
    def lengths_B(self) -> torch.Tensor:
        """Positions that each row holds, int64."""
        return self._places.lengths_B

    def join(
        self,
        computed: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        sequence_of_row: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Add rows after those in use.

        Args:
            computed: keys and values of each layer, both [U, H, P, D]; positions after a
                sequence's own length mean nothing. Empty where no sequence has any position.
            sequence_of_row: [new rows], int64: which of the U sequences a row is.
            lengths: [new rows], int64: positions of each.
        """
        first = self._places.rows
        for number, layer in enumerate(self._of_layer):
            layer.add(first, computed[number] if computed else None, sequence_of_row)
        # Last: a layer that found no memory leaves the rows as they were.
        self._places.put(torch.cat([self._places.lengths_B.to(lengths.device), lengths]))

    def leave(self, gone: Sequence[int]) -> list[int]:
        """Give up rows; returns, for each row that is left, the place it had before."""
        absent = set(gone)
        left = self._places.rows - len(absent)
        order = list(range(left))
        gaps = sorted(row for row in absent if row < left)
        movers = [row for row in range(left, self._places.rows) if row not in absent]
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        for layer in self._of_layer:
            layer.move(movers, gaps)
        self._places.put(self._places.lengths_B[order])
        return order

    def advance(self) -> None:
        """A forward wrote one position in each row."""
        self._places.put(self._places.lengths_B + 1)


class _Places:
    """The rows of all layers. Not the cache itself: a cycle would keep tensors alive."""

    def __init__(self) -> None:
        self.put(torch.zeros(0, dtype=torch.int64))

    def put(self, lengths_B: torch.Tensor) -> None:
        """Positions of each row from now on; read from the device once, not once per layer."""
        self.lengths_B = lengths_B
        self.rows = len(lengths_B)
        self.width = int(lengths_B.max()) if self.rows else 0


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # has no types
    """One layer's keys and values, [R, H, C, D]."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    is_sliding = False

    def __init__(self, places: _Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._places = places

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: room is taken as rows and positions come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one position per row, [B, H, 1, D]; returns all keys and values in use."""
        lengths_B, width = self._places.lengths_B, self._places.width + 1
        rows = len(lengths_B)
        kept = []
        for mine, states in (("keys", key_states), ("values", value_states)):
            room = self._room(mine, states, rows, width)
            room[torch.arange(rows, device=room.device), :, lengths_B] = states[:, :, 0]
            kept.append(room[:rows, :, :width])
        return kept[0], kept[1]

    def add(
        self,
        first: int,
        computed: tuple[torch.Tensor, torch.Tensor] | None,
        sequence_of_row: torch.Tensor,
    ) -> None:
        """Rows from `first` on take the keys and values of their sequence."""
        rows = slice(first, first + len(sequence_of_row))
        for mine, states in zip(("keys", "values"), computed or (None, None), strict=True):
            if states is not None:
                room = self._room(mine, states, rows.stop, states.shape[2])
                room[rows, :, : states.shape[2]] = states[sequence_of_row]
                room[rows, :, states.shape[2] :] = 0
            elif getattr(self, mine) is not None and len(getattr(self, mine)) > first:
                getattr(self, mine)[rows] = 0

    def move(self, movers: list[int], gaps: list[int]) -> None:
        """Copy rows into the places of others."""
        for room in (self.keys, self.values):
            if room is not None and movers:
                room[gaps] = room[movers]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Positions of the longest row, those of the query included; where they begin.

        transformers 5.0 gives the places of the query instead of how many they are.
        """
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self._places.width + queries, 0

    def get_seq_length(self) -> int:
        """Positions of the longest row."""
        return self._places.width

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as transformers 5.0 calls it."""
        return -1

    def _room(self, mine: str, like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """This layer's keys or values, with room for so much: twice as much as before, or more."""
        room: torch.Tensor | None = getattr(self, mine)
        had = (0, 0) if room is None else (room.shape[0], room.shape[2])
        if room is not None and had[0] >= rows and had[1] >= width:
            return room
        more_rows = had[0] if had[0] >= rows else max(rows, 2 * had[0])
        positions = max(had[1], _POSITIONS)
        while positions < width:
            positions *= 2
        grown = like.new_zeros(more_rows, like.shape[1], positions, like.shape[3])
        if room is not None:
            grown[: had[0], :, : had[1]] = room
        setattr(self, mine, grown)
        return grown
