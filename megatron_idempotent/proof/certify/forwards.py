"""Watches the forwards of a rank's chunks: makes one fail, reads parameters in use, notes packs.

Hooks on the innermost modules see the forwards of every framework, however it calls them. Losses of
experts and of MTP layers are means over a microbatch. The adapter chooses which sequences share a
pack and how it is padded, so the oracle computes them over the packs noted here.

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

from megatron_idempotent.megatron.ddp import innermost
from megatron_idempotent.step import own_positions
from megatron_idempotent.step.pack_layout import padded_borders

from .oracle import PackSeen, counted
from .protocol import Planted, Rows, Wrong

Phase = Literal["forward", "backward", "gradient"]


class Forwards:
    """Hooks the training forwards of this rank's model chunks, to make one fail or to read
    parameters.

    Example: `with forwards.failing(2, "backward"): adapter.microbatch(rows)`.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Put a forward hook on each chunk's innermost module, inside DDP and other wrappers."""
        self.evaluated: str | None = None
        """A module that got a gradient after a forward in eval mode; None if there was none."""
        self.has_failed = False
        """True once the failure that `failing` plans has happened."""
        self._plan: tuple[int, Phase] | None = None
        self._forwards_done = 0
        self._first: Tensor | None = None  # the first layer's output
        self._read: Callable[[int], None] | None = None
        self._read_of: set[int] = set()
        for index, chunk in enumerate(chunks):
            inner = innermost(chunk)
            inner.register_forward_hook(self._hook_of(index))
            layers: Any = getattr(getattr(inner, "decoder", None), "layers", ())
            if index == 0 and len(layers):
                layers[0].register_forward_hook(self._keep)

    @contextmanager
    def failing(self, count: int | None, phase: Phase) -> Iterator[None]:
        """Make one microbatch of the first chunk fail within the block: the one whose training
        forward comes after `count` others. `phase` says how it fails.

        With "forward" the forward raises `Planted` at its end; with "backward" the backward raises
        it, when only the first layer is left; with "gradient" the backward begins with a gradient
        of NaN, and nothing is raised. With `count` None nothing fails.
        """
        self._plan = None if count is None else (count, phase)
        self._forwards_done, self.has_failed = 0, False
        try:
            yield
        finally:
            self._plan = self._first = None

    @contextmanager
    def reading(self, read: Callable[[int], None]) -> Iterator[None]:
        """Call `read` with the index of each chunk, once the chunk has run its first training
        forward in the block.

        The parameters are then those of the forward: gathers that were pending have ended, and
        the framework alone has waited for them.
        """
        self._read, self._read_of = read, set()
        try:
            yield
        finally:
            self._read = None

    def _hook_of(self, index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            trained = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if not torch.is_grad_enabled() or not trained:
                return
            evaluated = _left_in_eval(module)
            if evaluated is not None:
                _on_gradient(trained[0], lambda _: self._note(evaluated))
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
        count, phase = self._plan
        self._forwards_done += 1
        if self._forwards_done != count + 1:
            return
        if phase == "forward":
            self._raise(phase)
        elif phase == "gradient":
            _on_gradient(output, self._spoilt)
        else:
            first = output if self._first is None else self._first
            _on_gradient(first, lambda _: self._raise(phase))

    def _spoilt(self, gradient: Tensor) -> Tensor:
        self.has_failed = True
        return gradient * math.nan

    def _raise(self, phase: Phase) -> None:
        self.has_failed = True
        raise Planted(f"out of memory: the {phase} of the model fails, as the check asks")


def _left_in_eval(module: Any) -> str | None:
    for name, submodule in module.named_modules():
        if not submodule.training:
            return name or "the model"
    return None


def _tensors(output: Any) -> Iterable[Tensor]:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return (part for part in parts if isinstance(part, Tensor))


def _on_gradient(output: Any, act: Callable[[Tensor], Tensor | None]) -> None:
    output.register_hook(act)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SeenPart:
    """Holds, on the CPU, the tokens of a pack on which one context-parallel rank ran the model."""

    place_s: Tensor
    """The indices of its tokens in the pack."""
    fields: dict[str, Tensor]
    """`PackSeen`'s fields of the tokens [s]; no `real_S` if the model got no padding mask."""
    starts: tuple[int, ...]
    """The indices at which sequences begin, and S; padding belongs to the sequence before it."""
    lengths: tuple[int, ...]
    """Tokens of each sequence that others attend to."""


class PacksSeen:
    """Records the packed sequences that a model chunk gets in each training forward.

    Example: `PacksSeen(chunk).of_rows(rows, replica=0, gather=bench.gather)`.
    """

    def __init__(self, chunk: Any) -> None:
        """Put a forward hook on a chunk's innermost module, if the chunk belongs to the first
        pipeline stage; chunks of later stages get no tokens.
        """
        chunk = innermost(chunk)
        self._shares: list[SeenPart] = []
        if getattr(chunk, "pre_process", True):
            chunk.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(("input_ids", "position_ids"), args, strict=False)), **kwargs}
        borders = arguments.get("packed_seq_params")
        if borders is None or not torch.is_grad_enabled():
            return
        ends_n, starts_n = borders.cu_seqlens_q, padded_borders(borders)
        place_S = torch.arange(int(starts_n[-1]), device=ends_n.device)
        fields = {
            "tokens_S": arguments["input_ids"].long(),
            "positions_S": arguments["position_ids"].long(),
        }
        if (padding := arguments.get("padding_mask")) is not None:
            fields["real_S"] = ~padding.bool()
        self._shares.append(
            SeenPart(
                place_s=own_positions(place_S[None], cu_seqlens=starts_n)[0].cpu(),
                fields={name: value.detach().flatten().cpu() for name, value in fields.items()},
                starts=tuple(starts_n.tolist()),
                lengths=tuple(ends_n.diff().tolist()),
            )
        )

    def of_rows(
        self, rows: Iterable[Rows], *, replica: int, gather: Callable[[Any], list[Any]]
    ) -> list[PackSeen]:
        """Gather the packs that all ranks recorded; return those that contain `rows`, and clear the
        record. A collective.

        A pack is left out if all its rows are in later packs, because an aborted step made it, or
        if it has none, as on a replica that has run out of rows.

        Raises:
            Wrong: a row that counts is in no pack.
        """
        shares_of: dict[tuple[int, int], list[SeenPart]] = {}
        for source_replica, shares in gather((replica, self._shares)):
            for index, share in enumerate(shares):
                shares_of.setdefault((source_replica, index), []).append(share)
        self._shares = []
        missing = {
            tuple(tokens_T.tolist()): mask_T
            for call_rows in rows
            for tokens_T, mask_T in _sequences(call_rows)
        }
        packs = []
        for key in sorted(shares_of, reverse=True):
            pack = _joined(shares_of[key], missing)
            if pack is not None:
                packs.append(pack)
        lost = sum(bool(mask_T.any()) for mask_T in missing.values())
        if lost:
            raise Wrong(
                f"the packs that went through the model in training lack {lost} of the step's "
                "sequences: give the chunk their tokens, with packed_seq_params"
            )
        return packs


def _sequences(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each row's tokens without padding, and a mask that is 1 where a position counts, both
    on the CPU.
    """
    mask_BT = counted(rows).cpu()
    for row, length in enumerate(rows["lengths"].tolist()):
        yield rows["input_ids"][row, :length].cpu(), mask_BT[row, :length]


def _joined(shares: Sequence[SeenPart], missing: dict[tuple[int, ...], Tensor]) -> PackSeen | None:
    """Join the parts of one pack that the context-parallel ranks recorded, and return the whole
    pack. Rows that are in it are removed from `missing`, in place; if there are none, return None.
    """
    first = shares[0]
    size = first.starts[-1]
    fields = {name: torch.zeros(size, dtype=part.dtype) for name, part in first.fields.items()}
    for share in shares:
        for name, part in share.fields.items():
            fields[name][share.place_s] = part
    tokens_S, counts_S = fields["tokens_S"], torch.zeros(size, dtype=torch.float64)
    sequences = 0
    for start, end in zip(first.starts, first.starts[1:], strict=False):
        # The longest row that the segment begins with; padding follows it.
        for length in range(end - start, 0, -1):
            mask_T = missing.pop(tuple(tokens_S[start : start + length].tolist()), None)
            if mask_T is not None:
                counts_S[start : start + length] = mask_T
                sequences += 1
                break
    if not sequences:
        return None
    return PackSeen(
        **fields,
        counts_S=counts_S,
        starts=first.starts,
        lengths=first.lengths,
        sequences=sequences,
    )
