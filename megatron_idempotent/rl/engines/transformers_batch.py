"""Computes the next tokens of a batch of requests, and caches their keys and values.

transformers has continuous batching of its own, but (5.23) it samples with the process's random
generator, so that a sample depends on its batch, and it keeps its cache when weights are swapped
during a pause.

Shapes: R allocated rows, B rows in use (the first ones; one per request), H key-value heads,
C allocated positions, U sequences to prefill, P positions of the longest of them, D head size,
V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .protocol import RoutedExperts

#: Positions per row in the first allocation.
_POSITIONS = 64


class RowCache(Cache):
    """Caches keys and values for a batch of requests; each request is a row, and rows differ in
    length.

    Each forward appends one position to every row. New rows are appended; when rows leave, the last
    rows move into the gaps, so nothing is recomputed. Positions past a row's length hold zeros or
    the row's own earlier values: a NaN of another row would pass through the attention mask.
    """

    def __init__(self, *, layers: int) -> None:
        self._lengths = _RowLengths()
        self._of_layer = [_RowLayer(self._lengths) for _ in range(layers)]
        super().__init__(layers=[*self._of_layer])

    @property
    def lengths_B(self) -> torch.Tensor:
        """The number of cached positions of each row, int64 [B]."""
        return self._lengths.lengths_B

    def join(
        self,
        computed: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        sequence_of_row: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Append rows to the cache, with the keys and values that a prefill has computed for these
        rows.

        Args:
            computed: keys and values of each layer, both [U, H, P, D]; values past a sequence's
                length are ignored. Empty if all sequences are empty.
            sequence_of_row: int64 [new rows]; each row's index into the U sequences.
            lengths: int64 [new rows]; the number of positions of each row.
        """
        first = self._lengths.rows
        for number, layer in enumerate(self._of_layer):
            layer.add(first, computed[number] if computed else None, sequence_of_row)
        # Last: if a layer runs out of memory, the rows stay as they were.
        self._lengths.put(torch.cat([self._lengths.lengths_B.to(lengths.device), lengths]))

    def leave(self, ended_rows: Sequence[int]) -> list[int]:
        """Remove the rows `ended_rows`, and move the last rows into the gaps. Return for each
        remaining row the index that the row had before.
        """
        absent = set(ended_rows)
        remaining = self._lengths.rows - len(absent)
        order = list(range(remaining))
        gaps = sorted(row for row in absent if row < remaining)
        movers = [row for row in range(remaining, self._lengths.rows) if row not in absent]
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        for layer in self._of_layer:
            layer.move(movers, gaps)
        self._lengths.put(self._lengths.lengths_B[order])
        return order

    def advance(self) -> None:
        """Add 1 to the lengths of all rows, after a forward has cached one more position for each
        row.
        """
        self._lengths.put(self._lengths.lengths_B + 1)


class _RowLengths:
    """Holds the number of cached positions of each row, for a `RowCache` and all of its layers.

    Layers refer to this object instead of the cache, because a reference cycle would keep tensors
    alive.
    """

    def __init__(self) -> None:
        self.put(torch.zeros(0, dtype=torch.int64))

    def put(self, lengths_B: torch.Tensor) -> None:
        """Set the number of cached positions of each row, int64 [B], and read the largest one to
        the host. Only this method waits for the device; the layers then use the number on the host.
        """
        self.lengths_B = lengths_B
        self.rows = len(lengths_B)
        self.width = int(lengths_B.max()) if self.rows else 0


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # has no types
    """One layer of a `RowCache`: the cached keys and values of all rows, both [R, H, C, D]."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    is_sliding = False

    def __init__(self, lengths: _RowLengths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._lengths = lengths

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: transformers calls this before the first `update`, and `_room` allocates the
        memory.
        """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one position to every row, given its keys and values, [B, H, 1, D]; return the
        cached keys and values of all rows.
        """
        lengths_B, width = self._lengths.lengths_B, self._lengths.width + 1
        rows = len(lengths_B)
        states_in_use = []
        for attribute, states in (("keys", key_states), ("values", value_states)):
            room = self._room(attribute, states, rows, width)
            room[torch.arange(rows, device=room.device), :, lengths_B] = states[:, :, 0]
            states_in_use.append(room[:rows, :, :width])
        return states_in_use[0], states_in_use[1]

    def add(
        self,
        first: int,
        computed: tuple[torch.Tensor, torch.Tensor] | None,
        sequence_of_row: torch.Tensor,
    ) -> None:
        """Write the prefilled keys and values of new rows into the rows from `first` on. If
        `computed` is None (all sequences are empty), write zeros.
        """
        rows = slice(first, first + len(sequence_of_row))
        for attribute, states in zip(("keys", "values"), computed or (None, None), strict=True):
            if states is not None:
                room = self._room(attribute, states, rows.stop, states.shape[2])
                room[rows, :, : states.shape[2]] = states[sequence_of_row]
                room[rows, :, states.shape[2] :] = 0
            elif getattr(self, attribute) is not None and len(getattr(self, attribute)) > first:
                getattr(self, attribute)[rows] = 0

    def move(self, movers: list[int], gaps: list[int]) -> None:
        """Copy the keys and values of the rows `movers` into the rows `gaps`."""
        for room in (self.keys, self.values):
            if room is not None and movers:
                room[gaps] = room[movers]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Return the length of the attention mask (longest row plus query) and its first position,
        0.

        transformers 5.0 passes the query's positions instead of their number.
        """
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self._lengths.width + queries, 0

    def get_seq_length(self) -> int:
        """Return the number of cached positions of the longest row."""
        return self._lengths.width

    def get_max_length(self) -> int:
        """Return -1: the number of positions has no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: the number of positions has no limit. transformers 5.0 calls this name."""
        return -1

    def _room(self, attribute: str, like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """Return this layer's tensor of keys or values (`attribute`), enlarged if it cannot hold
        `rows` rows of `width` positions.

        A dimension that is too small at least doubles.
        """
        room: torch.Tensor | None = getattr(self, attribute)
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
        setattr(self, attribute, grown)
        return grown


def cache_argument(model: Any) -> str:
    """Return the name of the argument through which a model's forward takes a cache: `cache` or
    `past_key_values`.

    transformers 5.24 renamed `past_key_values` to `cache`, and warns about the old name.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


#: Logits per chunk of `draw`: 4 M of them take 32 MB in float64.
_CHUNK = 1 << 22


def draw(
    logits_BV: torch.Tensor, *, temperatures_B: torch.Tensor, uniforms_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each row of logits, at the row's temperature and with the row's uniform
    random number. Return the tokens, int64 [B], and their log-probs after temperature, float32 [B].

    Log-probs are natural logarithms under the distribution after temperature. The token is the
    first one at which the cumulative distribution exceeds the row's uniform random number, float64
    in [0, 1). If a row's logits are not finite (-inf is allowed), its log-prob is NaN and its token
    is meaningless.
    """
    drawn = []
    rows = max(1, _CHUNK // logits_BV.shape[-1])
    for some_BV, temperature_B, uniform_B in zip(
        *(torch.split(tensor, rows) for tensor in (logits_BV, temperatures_B, uniforms_B)),
        strict=True,
    ):
        logprobs_BV = torch.log_softmax(some_BV.float() / temperature_B[:, None], dim=-1)
        cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
        # Scaled by the total: rounding may make the probabilities sum to less than 1, and a uniform
        # above the sum would select a token past the vocabulary.
        tokens_B = (cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]).sum(-1)
        # One NaN makes all of a row's log-probs NaN.
        drawn.append((tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]))
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([probs for _, probs in drawn])


Turn = tuple[int, float, float]
"""The inputs for sampling a row's next token: the last token so far, which is not cached yet, a
uniform random number in [0, 1), and the temperature."""


class RouteRecorder:
    """Records which experts a model's routers select for each token, by hooks that run in each
    forward.
    """

    def __init__(self, model: Any) -> None:
        routers = [
            module for module in model.modules() if type(module).__name__.endswith("TopKRouter")
        ]
        if not routers:
            raise ValueError(
                f"the {model.config.model_type} model has no routers of a known type, and "
                "routed_experts is True; leave it out for a model without experts"
            )
        self.layers, self.topk = len(routers), int(routers[0].top_k)
        self.dtype: Literal["uint8", "int16"] = (
            "uint8" if len(routers[0].weight) <= 256 else "int16"
        )
        self._taken: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(lambda _, __, output: self._taken.append(output[-1]))

    def take(self, rows: int) -> Any:
        """Return the experts that the last forward selected, as a NumPy array [rows, positions,
        layers, topk], and clear the record.
        """
        # Only the last outputs: a forward that raised may have left some before them.
        outputs, self._taken = self._taken[-self.layers :], []
        joined = torch.stack(outputs, 1).view(rows, -1, self.layers, self.topk)
        return joined.to(getattr(torch, self.dtype)).cpu().numpy()

    def recorded(self, data: bytes) -> RoutedExperts:
        """Make a `RoutedExperts` of one sequence, with this model's number of layers, top-k and
        dtype. `data` has the sequence's bytes from the results of `take`, joined in order of
        tokens.
        """
        return RoutedExperts(data=data, layers=self.layers, topk=self.topk, dtype=self.dtype)


class DecodeBatch:
    """Runs the model's forwards for a batch of requests, with a row for each request: `join`
    prefills new rows, and `draw` samples a token for every row. Methods block; call one at a time,
    from any thread.

    A row's cache holds all of its tokens except the last. `draw` feeds the last tokens of all rows,
    so rows that have just joined share the next forward with the others.
    """

    def __init__(self, model: Any, recorder: RouteRecorder | None = None) -> None:
        self._model, self._recorder = model, recorder
        self.routes: list[bytes] = []
        """The experts of the last call, per row: of all tokens of a new row after `join`, of one
        token after `draw`; [] without a recorder."""
        # Looked up once, not for every token.
        self._cache_of_model = cache_argument(model)
        self._cache_of_base = cache_argument(model.base_model)
        self._cache = RowCache(layers=model.config.num_hidden_layers)

    def clear(self) -> None:
        """Remove all rows from the batch, and free their cache."""
        self._cache = RowCache(layers=self._model.config.num_hidden_layers)

    @torch.no_grad()
    def join(self, sequences: Sequence[Sequence[int]], sequence_of_row: Sequence[int]) -> int:
        """Prefill distinct token sequences in one forward, and append the new rows of
        `sequence_of_row` to the batch. Several rows may have the same sequence, which is computed
        once. Return the number of new rows.

        Args:
            sequences: the tokens to cache: those of a row except its last; may be empty.
            sequence_of_row: for each new row, the index of its sequence.
        """
        device = self._model.device
        longest = max(map(len, sequences))
        lengths_U = torch.tensor([len(sequence) for sequence in sequences], device=device)
        sequence_indices = torch.tensor(sequence_of_row, device=device)
        computed: list[tuple[Any, Any]] = []
        self.routes = [b""] * len(sequence_indices) if self._recorder is not None else []
        if longest:
            # Padded on the right, where causal attention needs no mask: positions past a
            # sequence's length are never read.
            tokens_UP = torch.tensor(
                [[*sequence, *([0] * (longest - len(sequence)))] for sequence in sequences],
                device=device,
            )
            cache: Any = DynamicCache(config=self._model.config)
            # Without the output layer: prefill samples no token.
            caching = {self._cache_of_base: cache}
            self._model.base_model(input_ids=tokens_UP, use_cache=True, **caching)
            computed = [(layer.keys, layer.values) for layer in cache.layers]
            if self._recorder is not None:
                routes = self._recorder.take(len(sequences))
                lengths = list(map(len, sequences))
                self.routes = [
                    routes[sequence, : lengths[sequence]].tobytes() for sequence in sequence_of_row
                ]
        self._cache.join(
            computed, sequence_of_row=sequence_indices, lengths=lengths_U[sequence_indices]
        )
        return len(sequence_indices)

    @torch.no_grad()
    def draw(self, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
        """Sample the next token of every row in one forward; return the tokens and their log-probs,
        by row.

        A log-prob is NaN if the row's logits are not finite.
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
            self.routes = [row_routes.tobytes() for row_routes in self._recorder.take(len(turns))]
        self._cache.advance()
        return tokens_B.tolist(), logprobs_B.tolist()

    @torch.no_grad()
    def leave(self, ended_rows: Sequence[int]) -> list[int]:
        """Remove the rows `ended_rows` from the batch. Return for each remaining row the index that
        the row had before.
        """
        return self._cache.leave(ended_rows)
