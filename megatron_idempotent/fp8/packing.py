"""Packs sequences into one row, padded for FP8 and MXFP8 kernels, and for parallel ranks.

Legend: n sequences, N their tokens, T tokens of the pack.

All code that packs, collates and computes uses this module's layout. With two layouts a position
could belong to another sequence than the loss assumes, without an error.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: The tokens of a block that Transformer Engine scales; and the multiple of tokens that a GEMM over
#: tokens (the weight's gradient) needs, because cuBLAS takes leading dimensions of 16 bytes.
_MXFP8, _BLOCK, _GEMM = 32, 128, 16
#: Transformer Engine needs a multiple of this many tokens in an input, before it is gathered.
_INPUT = 8
RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenAlignment:
    """Holds the numbers of tokens to whose multiples a sequence and a pack are padded. They count
    the tokens of all context- and tensor-parallel ranks together.

    Example: `TokenAlignment(sequence=4, pack=64).of_pack([3, 5]) == 64`.
    """

    sequence: int
    """The multiple for each sequence in a pack; only the layout needs it."""
    pack: int
    """The multiple for the pack, and for each row of a padded batch; layout and kernels need it."""

    def __post_init__(self) -> None:
        _positive("TokenAlignment", sequence=self.sequence, pack=self.pack)
        if self.pack % self.sequence:
            raise ValueError(
                f"TokenAlignment() got pack={self.pack} and sequence={self.sequence}; "
                "allowed: a pack that is a multiple of a sequence, since padding is a sequence too"
            )

    def of_sequence(self, tokens: int) -> int:
        """Return how many tokens a sequence of `tokens` tokens takes in a pack, padding counted."""
        return -(-tokens // self.sequence) * self.sequence

    def of_pack(self, lengths: Iterable[int]) -> int:
        """Return the number of tokens of a pack of sequences with these lengths, padding included.
        For one sequence that is the width of its row.
        """
        return -(-sum(map(self.of_sequence, lengths)) // self.pack) * self.pack

    @classmethod
    def of_config(cls, config: Any) -> TokenAlignment:
        """Read the multiples from a TransformerConfig, Megatron's arguments, or a similar mapping.

        Reads `fp8`, `fp8_recipe`, `tensor_model_parallel_size`, `context_parallel_size` and
        `sequence_parallel`.

        Raises:
            ValueError: one of them is missing or not resolved, or they contradict each other.
        """
        recipe = None
        if _field(config, "fp8"):
            recipe = _field(config, "fp8_recipe")
            if recipe is None:
                raise ValueError(
                    f"fp8={_field(config, 'fp8')!r} with fp8_recipe=None: set the recipe that the "
                    f"model computes with, {', '.join(RECIPES)}"
                )
        for name in ("fp4", "hybrid_context_parallel"):
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            if value:
                raise ValueError(
                    f"{name}={value!r} is not known to of_config(); give its multiples yourself, "
                    "as TokenAlignment(sequence=…, pack=…)"
                )
        return token_alignment(
            recipe,
            _field(config, "tensor_model_parallel_size"),
            _field(config, "context_parallel_size"),
            _field(config, "sequence_parallel"),
        )


def token_alignment(
    recipe: str | None, tp: int, cp: int, sequence_parallel: bool
) -> TokenAlignment:
    """Return the `TokenAlignment` for a recipe and numbers of ranks: the multiples to which
    sequences and packs are padded, counting the tokens of all ranks together.

    Context parallelism cuts each sequence into 2 · cp pieces. Sequence parallelism cuts the tokens
    of a context-parallel rank into tp pieces, across sequences; without it kernels get no such
    pieces. Transformer Engine 2.3 to 2.20 needs multiples of

    - 8 tokens for any input, before it is gathered, and 16 after (`assert_dim_for_fp8_exec`, and
      cuBLAS in the weight's gradient, whose inner dimension is the tokens);
    - 32 for MXFP8, before it is gathered, else `MXFP8Quantizer` raises;
    - 128 for "blockwise" under sequence parallelism, before it is gathered, else it gathers in high
      precision, with a warning, and quantizes again (`Float8BlockQuantizer.is_quantizable`).

    Args:
        recipe: Megatron's `fp8_recipe`: "delayed", "tensorwise", "mxfp8" or "blockwise"; None
            if FP8 is off.
        tp: the number of tensor-parallel ranks.
        cp: the number of context-parallel ranks.
        sequence_parallel: Megatron's `sequence_parallel`.

    Raises:
        ValueError: a recipe that is none of those, "auto" in particular, or sizes that cannot be.

    Example:
        alignment = token_alignment("mxfp8", tp=2, cp=2, sequence_parallel=True)
        assert (alignment.sequence, alignment.pack) == (4, 128)
    """
    _positive("token_alignment", tp=tp, cp=cp)
    if not isinstance(sequence_parallel, bool):
        raise ValueError(
            f"token_alignment() got sequence_parallel={sequence_parallel!r}; allowed: a bool"
        )
    if sequence_parallel and tp == 1:
        raise ValueError(
            "token_alignment() got sequence_parallel=True with tp=1, and sequence "
            "parallelism needs several tensor-parallel ranks; turn it off, or give their number"
        )
    pieces = tp if sequence_parallel else 1
    # The multiple of one context-parallel rank's tokens.
    if recipe is None:
        share = pieces
    elif recipe in ("delayed", "tensorwise"):
        share = math.lcm(_GEMM, _INPUT * pieces)
    elif recipe == "mxfp8":
        share = _MXFP8 * pieces
    elif recipe == "blockwise":
        share = _BLOCK * pieces if sequence_parallel else _GEMM
    else:
        remedy = "resolve it where the model is configured"
        if recipe == "custom":
            remedy = "give TokenAlignment(sequence=…, pack=…) what its quantizers take, or name one"
        raise ValueError(
            f"token_alignment() got recipe {str(getattr(recipe, 'value', recipe))!r}, and no "
            f"multiple of it is known; {remedy} of {', '.join(RECIPES)}, or None without FP8"
        )
    sequence = 2 * cp if cp > 1 else 1
    return TokenAlignment(sequence=sequence, pack=math.lcm(sequence, cp * share))


def _positive(caller: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{caller}() got {name}={size!r}; allowed: integers, 1 or more")


def _field(config: Any, name: str) -> Any:
    try:
        return config[name] if isinstance(config, Mapping) else getattr(config, name)
    except (KeyError, AttributeError):
        raise ValueError(
            f"{type(config).__name__} has no {name}: give Megatron's TransformerConfig or arguments"
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """Maps the tokens of sequences to positions in a pack; `Pack.of` creates one.

    Each sequence is padded to a multiple of `alignment.sequence`. Further padding that the pack
    needs is a segment of its own: no sequence attends to it, and it attends to none.

    Example:
        pack = Pack.of([5, 3], token_alignment("mxfp8", tp=1, cp=1, sequence_parallel=False))
        tokens = pack.join(sequences, fill=pad_id)
        targets = shift_targets(tokens, mask=pack.mask, cu_seqlens=pack.cu_seqlens)
        stats = token_logprobs(logits=model(tokens), targets=targets)
        logprobs = pack.split(stats.logprob)  # [length] of each sequence
        sequence_logprobs_n = pack.sums(stats.logprob)
    """

    lengths: tuple[int, ...]
    """The number of tokens of each sequence, without padding."""
    tokens: int
    """T, the number of tokens with padding: a multiple of `alignment.pack`."""
    segments: tuple[int, ...]
    """The number of tokens of each segment, padding included; a last one may be padding alone."""
    max_seqlen: int
    """The number of tokens of the longest segment, padding included."""
    cu_seqlens: Tensor
    """[n + 1] or, with a segment of padding at the end, [n + 2], int32: where segments begin, and
    T. The same for queries and keys."""
    position_ids: Tensor
    """[T], int64: counted from 0 in each segment."""
    mask: Tensor
    """[T], bool: False for padding."""
    place_N: Tensor
    """[N], int64: the position in the pack of each token of the sequences."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Tensor,
        alignment: TokenAlignment,
        *,
        tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> Pack:
        """Return the `Pack` for sequences of these lengths, which may be 0.

        Args:
            lengths: [n]; a tensor is read by the host once.
            alignment: the multiples that `token_alignment` returns.
            tokens: T, if all packs have to be equally long, as for pipelines, or a rank has no
                sequences; None for the smallest possible.
            device: the device of the tensors; None for that of `lengths`, or the CPU.

        Raises:
            ValueError: a length is below 0, or `tokens` is too small or not aligned.
        """
        if isinstance(lengths, Tensor):
            device = lengths.device if device is None else device
            lengths = lengths.tolist()
        if any(isinstance(length, float) or length < 0 for length in lengths):
            raise ValueError(f"Pack.of() got lengths {list(lengths)}; allowed: integers, 0 or more")
        needed = alignment.of_pack(lengths)
        total = needed if tokens is None else tokens
        if total < needed or total % alignment.pack:
            raise ValueError(
                f"Pack.of() got tokens={tokens} for sequences that take {needed}; allowed: that or "
                f"more, in multiples of {alignment.pack}"
            )
        segments = [alignment.of_sequence(length) for length in lengths]
        if sum(segments) < total:
            segments.append(total - sum(segments))

        return cls.laid_out(lengths, segments, device=device)

    @classmethod
    def laid_out(
        cls,
        lengths: Sequence[int],
        segments: Sequence[int],
        *,
        device: torch.device | str | None = None,
    ) -> Pack:
        """Return the `Pack` for sequences of these lengths, whose padded sizes are `segments`.

        Example: `Pack.laid_out(pack.lengths, pack.segments)` is that pack again.
        """

        def on_device(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # All sizes are computed on the host, so nothing below waits for the device.
        n, size, total = len(lengths), sum(lengths), sum(segments)
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
            segments=tuple(segments),
            max_seqlen=max(segments, default=0),
            cu_seqlens=torch.cat([ends_m.new_zeros(1), ends_m]).int(),
            position_ids=torch.arange(total, device=device) - begin_T,
            mask=mask,
            place_N=place_N,
        )

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The position of each sequence's first token, and its number of tokens without padding."""
        starts = itertools.accumulate(self.segments, initial=0)
        return tuple(zip(starts, self.lengths, strict=False))

    def join(self, sequences: Sequence[Tensor] | Tensor, *, fill: float = 0) -> Tensor:
        """Lay out the sequences' token values as the pack's tokens, [T, ...]; differentiable.

        Args:
            sequences: n tensors [length, ...], or one of all tokens, [N, ...]; for a padded batch
                `values[mask]`.
            fill: the value of padding: the padding token, `ignore_index`, False.

        Raises:
            ValueError: the lengths are not those of the pack.
        """
        if not isinstance(sequences, Tensor):
            lengths = tuple(len(sequence) for sequence in sequences)
            if lengths != self.lengths:
                raise ValueError(
                    f"join() got lengths {lengths}; the pack has {self.lengths}: give the "
                    "sequences that it was made for"
                )
            if not sequences:
                raise ValueError("join() got no sequences: give an empty tensor of their type")
            sequences = torch.cat([*sequences])
        if len(sequences) != len(self.place_N):
            raise ValueError(
                f"join() got {len(sequences)} tokens; the pack has {len(self.place_N)}: "
                f"give all sequences without padding, of lengths {self.lengths}"
            )
        pack = sequences.new_full((self.tokens, *sequences.shape[1:]), fill)
        return pack.index_copy(0, self.place_N, sequences)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split values of the pack into one tensor [length, ...] per sequence; differentiable.

        Args:
            values: [T, ...], or [1, T, ...] as a model returns it.

        Raises:
            ValueError: other than T values. Under context parallelism gather them first, with
                `context_parallel_whole`.
        """
        values = self._flat("split", values)
        return torch.split(values.index_select(0, self.place_N), [*self.lengths])

    def sums(self, values: Tensor) -> Tensor:
        """Add up each sequence's values, without padding; differentiable.

        It adds in float64, from each sequence's first token to its last, so that a sequence has the
        same sum in every pack. Nothing loops over sequences or waits for the device.

        Args:
            values: [T, ...] or [1, T, ...]. Under context parallelism gather them first, with
                `context_parallel_whole`.

        Returns:
            [n, ...] of the values' type; float32 for half precision, masks and integers.

        Raises:
            ValueError: other than T values.

        Example:
            nll_n = -pack.sums(stats.logprob * valid) / pack.sums(valid).clamp(min=1)
            loss = (nll_n * microbatch["sample_mask"]).sum()
        """
        values = self._flat("sums", values)
        exact = values.dtype in (torch.float32, torch.float64)
        # Not a product with the mask: padding may hold NaN.
        real = self.mask.view(-1, *[1] * (values.dim() - 1))
        summed: Tensor = _SegmentSums.apply(
            torch.where(real, values, 0).double(), self.cu_seqlens.long()
        )
        return summed[: len(self.lengths)].to(values.dtype if exact else torch.float32)

    def expand(self, values: Tensor, *, fill: float = 0) -> Tensor:
        """Repeat each sequence's value, such as an advantage, for its tokens; differentiable.

        Args:
            values: [n, ...]
            fill: the value of padding.

        Returns:
            [T, ...]

        Raises:
            ValueError: other than n values.
        """
        n = len(self.lengths)
        if values.dim() < 1 or len(values) != n:
            raise ValueError(
                f"expand() got values of shape {tuple(values.shape)} in a pack of {n} sequences: "
                "one for each"
            )
        filler = values.new_full((len(self.segments) - n, *values.shape[1:]), fill)
        spread: Tensor = _Spread.apply(
            torch.cat([values, filler]), self.cu_seqlens.long(), self.tokens
        )
        return torch.where(self.mask.view(-1, *[1] * (values.dim() - 1)), spread, fill)

    def _flat(self, caller: str, values: Tensor) -> Tensor:
        """Return `values` as [T, ...]; a model's output [1, T, ...] loses its first dimension."""
        if values.dim() > 1 and tuple(values.shape[:2]) == (1, self.tokens):
            values = values[0]
        if values.dim() < 1 or len(values) != self.tokens:
            raise ValueError(
                f"{caller}() got values of shape {tuple(values.shape)}; the pack has {self.tokens} "
                "tokens: give a value for each, padding included"
            )
        return values


class _SegmentSums(torch.autograd.Function):
    """Adds up values [T, ...] over each of the m segments between `borders` [m + 1], to [m, ...];
    the backward repeats the gradient of a segment for its tokens.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, borders: Tensor) -> Tensor:
        ctx.save_for_backward(borders)
        ctx.tokens = len(values)
        return _segment_sums(values, borders)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (borders,) = ctx.saved_tensors
        return _spread(gradient, borders, ctx.tokens), None


class _Spread(torch.autograd.Function):
    """Repeats the value of each segment between `borders` for its tokens, [m, ...] to [T, ...]; the
    backward sums the gradients of a segment's tokens in their order.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, borders: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(borders)
        return _spread(values, borders, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (borders,) = ctx.saved_tensors
        return _segment_sums(gradient.double(), borders).to(gradient.dtype), None, None


def _segment_sums(values: Tensor, borders: Tensor) -> Tensor:
    # It adds in a fixed order on every device; `index_add` on a GPU does not. Its checks, which
    # would read the lengths on the host, are off.
    sums: Tensor = torch.segment_reduce(
        values.contiguous(), "sum", offsets=borders, axis=0, unsafe=True
    )
    return sums


def _spread(values: Tensor, borders: Tensor, tokens: int) -> Tensor:
    number_T = torch.searchsorted(
        borders[1:].contiguous(), torch.arange(tokens, device=borders.device), right=True
    )
    return values.index_select(0, number_T)
