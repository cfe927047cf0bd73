"""Sequences one after the other, aligned as ranks and kernels want them.

Legend: n sequences, N their tokens, T tokens of the pack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .alignment import TokenAlignment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """Maps the tokens of sequences to their places in a pack. `Pack.of` makes one.

    Each sequence is padded to a multiple of `alignment.sequence`. What the pack needs beyond that
    is one more segment, of padding alone: no sequence attends to it, and it attends to none.

    Example:
        pack = Pack.of([5, 3], token_alignment("mxfp8", tp=1, cp=1, sequence_parallel=False))
        tokens = pack.join(sequences, fill=pad_id)
        targets = shift_targets(tokens, mask=pack.mask, cu_seqlens=pack.cu_seqlens)
        logprobs = pack.split(token_logprobs(logits=model(tokens), targets=targets).logprob)
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, without padding."""
    tokens: int
    """T, padding included: a multiple of `alignment.pack`."""
    max_seqlen: int
    """Tokens of the longest segment, padding included."""
    cu_seqlens: Tensor
    """[n + 1] or, with a segment of padding at the end, [n + 2], int32: where segments begin, and
    T. The same for queries and keys."""
    position_ids: Tensor
    """[T], int64: counted from 0 in each segment."""
    mask: Tensor
    """[T], bool: false for padding."""
    place_N: Tensor
    """[N], int64: where each token of the sequences is in the pack."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Tensor,
        alignment: TokenAlignment,
        *,
        tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> Pack:
        """Lay out sequences of those lengths; 0 is one of them.

        Args:
            lengths: [n]; a tensor is read by the host once.
            alignment: what `token_alignment` says.
            tokens: T, if it is to be the same for all packs, as pipelines want it, or for ranks
                without sequences; None for the least.
            device: of the tensors; None for that of `lengths`, or the CPU.

        Raises:
            ValueError: lengths below 0, or `tokens` that do not suffice or are not aligned.
        """
        if isinstance(lengths, Tensor):
            device = lengths.device if device is None else device
            lengths = lengths.tolist()
        if any(isinstance(each, float) or each < 0 for each in lengths):
            raise ValueError(f"Pack.of() got lengths {list(lengths)}: integers from 0 on")
        needed = alignment.of_pack(lengths)
        total = needed if tokens is None else tokens
        if total < needed or total % alignment.pack:
            raise ValueError(
                f"Pack.of() got tokens={tokens} for sequences that take {needed}: a multiple of "
                f"{alignment.pack} from there on"
            )
        segments = [alignment.of_sequence(each) for each in lengths]
        if sum(segments) < total:
            segments.append(total - sum(segments))

        def on_device(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # What is known on the host gives every size, so nothing below waits for the device.
        n, size = len(lengths), sum(lengths)
        lengths_n, segments_m = on_device(lengths), on_device(segments)
        ends_m = segments_m.cumsum(0)
        starts_m = ends_m - segments_m
        begin_T = torch.repeat_interleave(starts_m, segments_m, output_size=total)
        before_n = lengths_n.cumsum(0) - lengths_n
        shift_N = torch.repeat_interleave(starts_m[:n] - before_n, lengths_n, output_size=size)
        place_N = torch.arange(size, device=device) + shift_N
        mask = torch.zeros(total, dtype=torch.bool, device=device)
        mask[place_N] = True
        return cls(
            lengths=tuple(lengths),
            tokens=total,
            max_seqlen=max(segments, default=0),
            cu_seqlens=torch.cat([ends_m.new_zeros(1), ends_m]).int(),
            position_ids=torch.arange(total, device=device) - begin_T,
            mask=mask,
            place_N=place_N,
        )

    def join(self, sequences: Sequence[Tensor] | Tensor, *, fill: float = 0) -> Tensor:
        """Values of each token, in the pack [T, ...]; differentiable.

        Args:
            sequences: n tensors [length, ...], or one of all tokens, [N, ...]. A padded batch's
                are `values[mask]`.
            fill: the value of padding: the padding token, `ignore_index`, False.

        Raises:
            ValueError: lengths that are not those of the pack.
        """
        if not isinstance(sequences, Tensor):
            found = tuple(len(each) for each in sequences)
            if found != self.lengths:
                raise ValueError(f"join() got lengths {found} in a pack of {self.lengths}")
            if not sequences:
                raise ValueError("join() got no sequences: give an empty tensor of their type")
            sequences = torch.cat([*sequences])
        if len(sequences) != len(self.place_N):
            raise ValueError(
                f"join() got {len(sequences)} tokens in a pack of {len(self.place_N)}: those of "
                f"all sequences, without padding, {self.lengths}"
            )
        pack = sequences.new_full((self.tokens, *sequences.shape[1:]), fill)
        return pack.index_copy(0, self.place_N, sequences)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits values of the pack, [T, ...], into each sequence's, [length, ...]; differentiable.

        Raises:
            ValueError: other than T values. Under context parallelism gather them first.
        """
        if len(values) != self.tokens:
            raise ValueError(f"split() got {len(values)} tokens of a pack of {self.tokens}")
        return torch.split(values.index_select(0, self.place_N), [*self.lengths])
