"""Notes the packs that go through a model, and finds the rows of a step in them.

Losses of experts and of MTP layers are means over a microbatch. Which sequences share a pack, and
what pads it, is the adapter's to choose, so the oracle has to be told.

Legend: S tokens of a pack, s those of them that one context-parallel rank computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.step import own_positions

from .oracle import PackSeen, counted
from .protocol import Rows, Wrong


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SeenPart:
    """Holds what one rank saw of a pack, on the CPU."""

    place_s: Tensor
    """The places of its tokens in the pack."""
    tokens_s: Tensor
    positions_s: Tensor
    real_s: Tensor | None
    """True for what is no padding, if the model was told."""
    starts: tuple[int, ...]
    """Ends with S. Sequences begin at these places; padding between them is included."""
    lengths: tuple[int, ...]
    """Tokens of each sequence that others attend to."""


class PacksSeen:
    """Notes each pack of a training forward of a model's first chunk.

    Example: `PacksSeen(chunk).of_rows(rows, replica=0, gather=bench.told_by_all)`.
    """

    def __init__(self, chunk: Any) -> None:
        """Put a hook on a chunk, below what wraps it. Stages after the first see no tokens."""
        while hasattr(chunk, "module"):
            chunk = chunk.module
        self._shares: list[SeenPart] = []
        if getattr(chunk, "pre_process", True):
            chunk.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(("input_ids", "position_ids"), args, strict=False)), **kwargs}
        borders = given.get("packed_seq_params")
        if borders is None or not torch.is_grad_enabled():
            return
        ends_n = borders.cu_seqlens_q
        padded_n = borders.cu_seqlens_q_padded
        starts_n = ends_n if padded_n is None else padded_n
        place_S = torch.arange(int(starts_n[-1]), device=ends_n.device)
        padding = given.get("padding_mask")
        self._shares.append(
            SeenPart(
                place_s=own_positions(place_S[None], cu_seqlens=starts_n)[0].cpu(),
                tokens_s=given["input_ids"].detach().flatten().cpu(),
                positions_s=given["position_ids"].detach().flatten().cpu(),
                real_s=None if padding is None else ~padding.flatten().bool().cpu(),
                starts=tuple(starts_n.tolist()),
                lengths=tuple(ends_n.diff().tolist()),
            )
        )

    def of_rows(
        self, rows: Iterable[Rows], *, replica: int, gather: Callable[[Any], list[Any]]
    ) -> list[PackSeen]:
        """Return the packs of all ranks that hold these rows, and forget what was seen.

        All ranks take part. A pack of which all rows are in a later one belongs to a step that was
        aborted, and one without any is a replica's that has run out of rows.

        Raises:
            Wrong: a row that counts is in no pack.
        """
        whole: dict[tuple[int, int], list[SeenPart]] = {}
        for other, shares in gather((replica, self._shares)):
            for index, share in enumerate(shares):
                whole.setdefault((other, index), []).append(share)
        self._shares = []
        missing = {
            tuple(tokens_T.tolist()): mask_T
            for each in rows
            for tokens_T, mask_T in _sequences(each)
        }
        found = []
        for key in sorted(whole, reverse=True):
            pack = _joined(whole[key], missing)
            if pack is not None:
                found.append(pack)
        lost = sum(bool(mask_T.any()) for mask_T in missing.values())
        if lost:
            raise Wrong(
                f"the packs that went through the model in training lack {lost} of the step's "
                "sequences: give the chunk their tokens, with packed_seq_params"
            )
        return found


def _sequences(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each row without padding, and 1 where a position counts."""
    mask_BT = counted(rows).cpu()
    for row, length in enumerate(rows["lengths"].tolist()):
        yield rows["input_ids"][row, :length].cpu(), mask_BT[row, :length]


def _joined(shares: Sequence[SeenPart], missing: dict[tuple[int, ...], Tensor]) -> PackSeen | None:
    """Join what ranks saw of a pack, and take its rows out of `missing`; None if it has none."""
    first = shares[0]
    size = first.starts[-1]
    tokens_S = torch.zeros(size, dtype=torch.int64)
    positions_S = torch.zeros(size, dtype=torch.int64)
    counts_S = torch.zeros(size, dtype=torch.float64)
    real_S = None if first.real_s is None else torch.zeros(size, dtype=torch.bool)
    for share in shares:
        tokens_S[share.place_s] = share.tokens_s
        positions_S[share.place_s] = share.positions_s
        if real_S is not None and share.real_s is not None:
            real_S[share.place_s] = share.real_s
    sequences = 0
    for start, end in zip(first.starts, first.starts[1:], strict=False):
        # The longest row that the segment begins with: what is after it is padding.
        for length in range(end - start, 0, -1):
            mask_T = missing.pop(tuple(tokens_S[start : start + length].tolist()), None)
            if mask_T is not None:
                counts_S[start : start + length] = mask_T
                sequences += 1
                break
    if not sequences:
        return None
    return PackSeen(
        tokens_S=tokens_S,
        positions_S=positions_S,
        counts_S=counts_S,
        real_S=real_S,
        starts=first.starts,
        lengths=first.lengths,
        sequences=sequences,
    )
