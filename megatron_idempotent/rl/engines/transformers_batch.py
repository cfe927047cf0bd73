"""Computes the next tokens of a batch of requests, whose keys and values it caches.

transformers batches continuously itself, but (5.23) draws with the generator of the process, so
that a sample depends on its batch, and keeps its cache when weights are exchanged in a pause.

Shapes: R rows there is room for, B rows in use (the first ones), each of a request, H heads of keys
and values, C positions there is room for, U sequences to be prefilled, P positions of the longest
of them, D head size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .protocol import RoutedExperts

#: Positions that a row has room for at first.
_POSITIONS = 64


class RowCache(Cache):
    """Caches keys and values of rows, each of its own length, from position 0 on.

    One forward gives every row one more position. Rows join after the others and leave without the
    others being computed again: the last ones move into the gaps. After its own length a row holds
    zeros, or what it wrote there itself, because another row's NaN would come through the mask.
    """

    def __init__(self, *, layers: int) -> None:
        self._places = _Places()
        self._of_layer = [_RowLayer(self._places) for _ in range(layers)]
        super().__init__(layers=[*self._of_layer])

    @property
    def lengths_B(self) -> torch.Tensor:
        """The number of positions that each row holds, [B] of int64."""
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
            sequence_of_row: [new rows], int64: the number of each row's sequence among the U.
            lengths: [new rows], int64: the number of positions of each.
        """
        first = self._places.rows
        for number, layer in enumerate(self._of_layer):
            layer.add(first, computed[number] if computed else None, sequence_of_row)
        # Last: a layer that found no memory leaves the rows as they were.
        self._places.put(torch.cat([self._places.lengths_B.to(lengths.device), lengths]))

    def leave(self, gone: Sequence[int]) -> list[int]:
        """Give up rows; return, for each row that is left, the place it had before."""
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
        """Note that a forward wrote one position in each row."""
        self._places.put(self._places.lengths_B + 1)


class _Places:
    """Holds the rows' lengths for all layers, which do not refer to the cache itself.

    Such a cycle of references would keep tensors alive.
    """

    def __init__(self) -> None:
        self.put(torch.zeros(0, dtype=torch.int64))

    def put(self, lengths_B: torch.Tensor) -> None:
        """Set the length of each row; the host reads them once here, not once per layer."""
        self.lengths_B = lengths_B
        self.rows = len(lengths_B)
        self.width = int(lengths_B.max()) if self.rows else 0


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # has no types
    """Holds one layer's keys and values, [R, H, C, D]."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    is_sliding = False

    def __init__(self, places: _Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._places = places

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: room is taken as rows and positions come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one position per row, [B, H, 1, D]; return all keys and values in use."""
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
        """Write the keys and values of their sequences to the rows from `first` on."""
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
        """Return the positions of the longest row, with the query's, and where they begin: 0.

        transformers 5.0 gives the places of the query instead of their number.
        """
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self._places.width + queries, 0

    def get_seq_length(self) -> int:
        """Return the number of positions of the longest row."""
        return self._places.width

    def get_max_length(self) -> int:
        """Return -1, for no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, for no limit; transformers 5.0 has this name."""
        return -1

    def _room(self, mine: str, like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """Return this layer's keys or values, with room for `rows` and `width`.

        If there is less, the room grows to twice its size, or more.
        """
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


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model's forward takes a cache.

    transformers 5.24 calls `cache` what was `past_key_values`, and warns of the older name.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


#: Logits that are drawn from at once: 4 M of them are 32 MB in float64.
_CHUNK = 1 << 22


def draw(
    logits_BV: torch.Tensor, *, temperatures_B: torch.Tensor, uniforms_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row; return tokens and their log-probs, [B] of int64 and float32.

    Log-probs are natural, of the tempered distribution. The token is the one at which the
    cumulative distribution passes the row's uniform, a float64 in [0, 1). If a row's logits are not
    finite (-inf is allowed) its log-prob is NaN, and its token means nothing.
    """
    drawn = []
    rows = max(1, _CHUNK // logits_BV.shape[-1])
    for some_BV, temperature_B, uniform_B in zip(
        *(torch.split(each, rows) for each in (logits_BV, temperatures_B, uniforms_B)), strict=True
    ):
        logprobs_BV = torch.log_softmax(some_BV.float() / temperature_B[:, None], dim=-1)
        cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
        # Scaled by the total: probabilities add up to 1 only up to rounding, and a uniform above
        # the total would fall off the end of the vocabulary.
        tokens_B = (cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]).sum(-1)
        # One NaN makes all of a row's log-probs NaN.
        drawn.append((tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]))
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([probs for _, probs in drawn])


Turn = tuple[int, float, float]
"""The inputs of a row's next token: the last token so far, which is not in the cache yet, the
number in [0, 1) that chooses the next one, and the temperature."""


class RouteRecorder:
    """Keeps the experts that the routers of a model took in its last forward, as bytes."""

    def __init__(self, model: Any) -> None:
        routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
        if not routers:
            raise ValueError(
                f"the {model.config.model_type} model has no routers that are known, and "
                "routed_experts=True was asked for; leave it out for a model without experts"
            )
        self.layers, self.topk = len(routers), int(routers[0].top_k)
        self.dtype: Literal["uint8", "int16"] = (
            "uint8" if len(routers[0].weight) <= 256 else "int16"
        )
        self._taken: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(lambda _, __, output: self._taken.append(output[-1]))

    def take(self, rows: int) -> Any:
        """Return the experts [rows, positions, layers, topk] of the last forward, on the host."""
        # The last ones: a forward that raised may have left some.
        taken, self._taken = self._taken[-self.layers :], []
        joined = torch.stack(taken, 1).view(rows, -1, self.layers, self.topk)
        return joined.to(getattr(torch, self.dtype)).cpu().numpy()

    def recorded(self, data: bytes) -> RoutedExperts:
        """Return some tokens' experts, of the bytes of `take`."""
        return RoutedExperts(data=data, layers=self.layers, topk=self.topk, dtype=self.dtype)


class DecodeBatch:
    """Computes the rows of a running batch. Methods block; call one at a time, from any thread.

    A row's cache holds all of its tokens but the last one. `draw` feeds the last ones of all rows,
    so rows that joined just now take part in the same forward as the others.
    """

    def __init__(self, model: Any, recorder: RouteRecorder | None = None) -> None:
        self._model, self._recorder = model, recorder
        self.routes: list[bytes] = []
        """Experts in the last call: of each new row's tokens, or of each row's one; [] without a
        recorder."""
        # Looked up once, and not for each token.
        self._cache_of_model = cache_argument(model)
        self._cache_of_base = cache_argument(model.base_model)
        self._cache = RowCache(layers=model.config.num_hidden_layers)

    def clear(self) -> None:
        """Give up all rows, and their memory."""
        self._cache = RowCache(layers=self._model.config.num_hidden_layers)

    @torch.no_grad()
    def join(self, sequences: Sequence[Sequence[int]], sequence_of_row: Sequence[int]) -> int:
        """Compute sequences, each once, and add rows to them; return the number of new rows.

        Args:
            sequences: all tokens of a row but its last one; one may be empty.
            sequence_of_row: for each new row, the index of its sequence.
        """
        device = self._model.device
        longest = max(map(len, sequences))
        lengths_U = torch.tensor([len(sequence) for sequence in sequences], device=device)
        which = torch.tensor(sequence_of_row, device=device)
        computed: list[tuple[Any, Any]] = []
        self.routes = [b""] * len(which) if self._recorder is not None else []
        if longest:
            # Padded on the right, where causal attention needs no mask: what is after a
            # sequence's length is never read.
            tokens_UP = torch.tensor(
                [[*sequence, *([0] * (longest - len(sequence)))] for sequence in sequences],
                device=device,
            )
            cache: Any = DynamicCache(config=self._model.config)
            # Without the output layer: no token is drawn here.
            given = {self._cache_of_base: cache}
            self._model.base_model(input_ids=tokens_UP, use_cache=True, **given)
            computed = [(layer.keys, layer.values) for layer in cache.layers]
            if self._recorder is not None:
                taken = self._recorder.take(len(sequences))
                lengths = list(map(len, sequences))
                self.routes = [taken[of, : lengths[of]].tobytes() for of in sequence_of_row]
        self._cache.join(computed, sequence_of_row=which, lengths=lengths_U[which])
        return len(which)

    @torch.no_grad()
    def draw(self, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
        """Return the next token of every row and its log-prob, by one forward.

        The log-prob is NaN if the row's logits are not finite.
        """
        tokens, uniforms, temperatures = zip(*turns, strict=True)
        device = self._model.device
        lengths_B = self._cache.lengths_B
        positions = torch.arange(self._cache.get_seq_length() + 1, device=device)
        logits_BV = self._model(
            input_ids=torch.tensor([tokens], device=device).T,
            attention_mask=positions[None, :] <= lengths_B[:, None],
            position_ids=lengths_B[:, None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_of_model: self._cache},
        ).logits[:, -1]
        tokens_B, logprobs_B = draw(
            logits_BV,
            temperatures_B=torch.tensor(temperatures, dtype=torch.float32, device=device),
            uniforms_B=torch.tensor(uniforms, dtype=torch.float64, device=device),
        )
        if self._recorder is not None:
            self.routes = [each.tobytes() for each in self._recorder.take(len(turns))]
        self._cache.advance()
        return tokens_B.tolist(), logprobs_B.tolist()

    @torch.no_grad()
    def leave(self, gone: Sequence[int]) -> list[int]:
        """See `RowCache.leave`."""
        return self._cache.leave(gone)
