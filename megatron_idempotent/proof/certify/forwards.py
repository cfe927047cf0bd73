"""Watches the forwards of a rank's chunks: fails in one, reads what they compute with, notes packs.

Hooks on the innermost modules see the forwards of every framework, however it calls them. Losses of
experts and of MTP layers are means over a microbatch. Which sequences share a pack, and what pads
it, is the adapter's to choose, so the oracle has to be told.

Legend: S tokens of a pack, s those of them that one context-parallel rank computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_idempotent.step import own_positions

from .oracle import PackSeen, counted
from .protocol import Planted, Rows, Wrong

Where = Literal["forward", "backward", "gradient"]


class Forwards:
    """Counts the training forwards of this rank's first chunk, and acts on them.

    Example: `with forwards.failing(2, "backward"): adapter.microbatch(rows)`.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Put hooks on the chunks, below what wraps them."""
        self.evaluated: str | None = None
        """A module through which a gradient came after a forward in eval mode; None if none did."""
        self.met = False
        """True if the failure that was asked for has come."""
        self._plan: tuple[int, Where] | None = None
        self._seen = 0
        self._first: Tensor | None = None  # what the first layer has made
        self._read: Callable[[int], None] | None = None
        self._read_of: set[int] = set()
        for index, chunk in enumerate(chunks):
            inner = innermost(chunk)
            inner.register_forward_hook(self._after(index))
            layers: Any = getattr(getattr(inner, "decoder", None), "layers", ())
            if index == 0 and len(layers):
                layers[0].register_forward_hook(self._keep)

    @contextmanager
    def failing(self, after: int | None, where: Where) -> Iterator[None]:
        """Raise `Planted` in the block once so many training forwards of the first chunk are done.

        It is raised at the end of the next one's forward, or in its backward, when only the first
        layer is left; with "gradient" this backward begins with NaN instead. None does nothing.
        """
        self._plan = None if after is None else (after, where)
        self._seen, self.met = 0, False
        try:
            yield
        finally:
            self._plan = self._first = None

    @contextmanager
    def reading(self, read: Callable[[int], None]) -> Iterator[None]:
        """Call `read` with a chunk's number after its first training forward in the block.

        The parameters are then those that the forward has computed with: whatever was pending for
        them has come, and nobody has waited for it but the framework.
        """
        self._read, self._read_of = read, set()
        try:
            yield
        finally:
            self._read = None

    def _after(self, index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            trained = [each for each in _tensors(output) if each.requires_grad]
            if not torch.is_grad_enabled() or not trained:
                return
            left = _left_in_eval(module)
            if left is not None:
                _on_gradient(trained[0], lambda _: self._note(left))
            if self._read is not None and index not in self._read_of:
                self._read_of.add(index)
                self._read(index)
            if index == 0 and self._plan is not None:
                self._fail_at(trained[0])

        return hook

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        if self._plan is not None:
            self._first = next((e for e in _tensors(output) if e.requires_grad), None)

    def _note(self, name: str) -> None:
        self.evaluated = self.evaluated or name

    def _fail_at(self, output: Tensor) -> None:
        assert self._plan is not None
        after, where = self._plan
        self._seen += 1
        if self._seen != after + 1:
            return
        if where == "forward":
            self._raise(where)
        elif where == "gradient":
            _on_gradient(output, self._spoilt)
        else:
            first = output if self._first is None else self._first
            _on_gradient(first, lambda _: self._raise(where))

    def _spoilt(self, gradient: Tensor) -> Tensor:
        self.met = True
        return gradient * math.nan

    def _raise(self, where: Where) -> None:
        self.met = True
        raise Planted(f"out of memory: the {where} of the model fails, as the check asks")


def innermost(chunk: Any) -> Any:
    """Return the module that DDP and other wrappers are around."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _left_in_eval(module: Any) -> str | None:
    for name, each in module.named_modules():
        if not each.training:
            return name or "the model"
    return None


def _tensors(output: Any) -> Iterable[Tensor]:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return (each for each in parts if isinstance(each, Tensor))


def _on_gradient(output: Any, act: Callable[[Tensor], Tensor | None]) -> None:
    output.register_hook(act)


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
        chunk = innermost(chunk)
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
