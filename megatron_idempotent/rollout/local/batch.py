"""The model and the requests in its cache: what one thread computes at a time.

transformers batches continuously itself, but (5.23) draws with the generator of the process, so
that a sample depends on its batch, and keeps its cache when weights are exchanged in a pause.

Shapes: B rows in the cache, U sequences to be prefilled, P positions of the longest of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from .cache import RowCache
from .sampling import draw


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The inputs of a row's next token. Example: `Turn(token=5, place=0, seed=1, ...)`."""

    token: int
    """The last token so far, which is not in the cache yet."""
    place: int
    """The number of tokens of the response so far."""
    seed: int
    temperature: float


class Batch:
    """Rows of a running batch. Every method blocks; one at a time, from whatever thread.

    A row's cache holds all of its tokens but the last one. `draw` feeds the last ones of all rows,
    so rows that joined just now take part in the same forward as the others.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = RowCache(layers=model.config.num_hidden_layers)

    @property
    def rows(self) -> int:
        """Rows in use."""
        return self._cache.rows

    def clear(self) -> None:
        """Give up all rows, and their memory."""
        self._cache = RowCache(layers=self._model.config.num_hidden_layers)

    @torch.no_grad()
    def join(self, sequences: Sequence[Sequence[int]], sequence_of_row: Sequence[int]) -> int:
        """Compute sequences, each once; add a row per entry of `sequence_of_row`. Returns how many.

        Args:
            sequences: all tokens of a row but its last one; may be empty.
            sequence_of_row: index into `sequences`.
        """
        device = self._model.device
        longest = max(map(len, sequences))
        lengths_U = torch.tensor([len(sequence) for sequence in sequences], device=device)
        which = torch.tensor(sequence_of_row, device=device)
        computed: list[tuple[Any, Any]] = []
        if longest:
            # Padded on the right, where causal attention needs no mask: what is behind a
            # sequence's length is never read.
            tokens_UP = torch.tensor(
                [[*sequence, *([0] * (longest - len(sequence)))] for sequence in sequences],
                device=device,
            )
            cache: Any = DynamicCache(config=self._model.config)
            # Without the output layer: no token is drawn here.
            self._model.base_model(input_ids=tokens_UP, past_key_values=cache, use_cache=True)
            computed = [(layer.keys, layer.values) for layer in cache.layers]
        self._cache.join(computed, sequence_of_row=which, lengths=lengths_U[which])
        return len(which)

    @torch.no_grad()
    def draw(self, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
        """The next token of every row and its log-prob, by one forward; NaN as `sampling.draw`."""
        device = self._model.device
        lengths_B = self._cache.lengths_B
        positions = torch.arange(self._cache.get_seq_length() + 1, device=device)
        logits_BV = self._model(
            input_ids=torch.tensor([[turn.token] for turn in turns], device=device),
            attention_mask=positions[None, :] <= lengths_B[:, None],
            position_ids=lengths_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens_B, logprobs_B = draw(
            logits_BV,
            temperatures_B=torch.tensor(
                [turn.temperature for turn in turns], dtype=torch.float32, device=device
            ),
            seeds_B=torch.tensor([turn.seed for turn in turns], device=device),
            places_B=torch.tensor([turn.place for turn in turns], device=device),
        )
        self._cache.advance()
        return tokens_B.tolist(), logprobs_B.tolist()

    @torch.no_grad()
    def leave(self, gone: Sequence[int]) -> list[int]:
        """Give up rows; returns, for each row that is left, the place it had before."""
        return self._cache.leave(gone)
