"""Quantizes weights to E4M3 with one scale for each block of 128 × 128, as engines read them.

Legend: E experts, R rows (output features), C columns, r and c blocks along them, K the side of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.kernel_choice import uses_triton

#: Side of a block, as `weight_block_size` says in an engine's config.json.
BLOCK = 128
E4M3 = torch.float8_e4m3fn
#: The largest number of E4M3, and the largest that is rounded to it: half a step above.
_LARGEST, _ROUNDED_TO_LARGEST = 448.0, 464.0
#: No scale is smaller: values that E4M3 does not reach with it are rounded to its least, or to 0.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
#: Bytes of float32 copies that are held at a time; at least one row of blocks is.
_SLAB_BYTES = 32 << 20

#: The least compute capability with E4M3, and the types that the kernel reads and rounds to.
_E4M3_CAPABILITY = (8, 9)
_KERNEL_TYPES = {torch.float32, torch.bfloat16, torch.float16}

Scales = Literal["float32", "ue8m0"]


class Blockwise(NamedTuple):
    """Holds a quantized weight, which is about `codes` · `scale_inv`; each block has one scale."""

    codes: Tensor
    """[..., R, C] of float8_e4m3fn."""
    scale_inv: Tensor
    """[..., ⌈R / 128⌉, ⌈C / 128⌉] of float32: the factors of the codes, under DeepSeek's name."""


def quantize_blockwise(
    weight: Tensor,
    *,
    scales: Scales = "float32",
    dtype: torch.dtype = torch.bfloat16,
    name: str = "weight",
    triton: bool | None = None,
) -> Blockwise:
    """Quantize a weight, or the weights of all experts, to E4M3 with a scale for each block of 128
    × 128.

    A block's scale is its largest magnitude / 448 in float32; with "ue8m0" the least power of two
    that lets that magnitude be rounded to at most 448, so that quantizing the result of
    `dequantize_blockwise` gives the same codes again. (⌈log₂(largest / 448)⌉, as it is often
    written, does not: 1.8 · 2ⁿ becomes 1.75 · 2ⁿ, which fits half the scale.) Blocks at the edges
    are as small as the edge leaves them. A block of zeros has scale 1. A scale is at least 2⁻¹²⁶.

    The same weight always gives the same bytes. Besides the result it takes some 80 MB, or 2.5
    times a row of blocks in float32; on a GPU with E4M3 one kernel reads and writes once, and takes
    no other memory. The host reads once whether all values are finite.

    Args:
        weight: [R, C] or [E, R, C], of a floating point type, on any device.
        scales: "float32", or "ue8m0" for powers of two, in float32 all the same.
        dtype: the type that the engine would get without FP8. The weight is rounded to it first:
            codes of a float32 master differ from those of the bfloat16 that training computes with.
        name: the weight's name in errors.
        triton: True computes with Triton's kernel, whose bytes are the same; False with PyTorch.
            None follows the environment's MEGATRON_IDEMPOTENT_TRITON, 1 or 0, and if that is not
            set uses the kernel on GPUs of compute capability 8.9 or higher. PyTorch always
            computes float64.

    Raises:
        ValueError: another shape or type, unknown scales, values that are not finite, or
            Triton asked for where its kernel cannot run.

    Example:
        codes, scale_inv = quantize_blockwise(weight, scales="ue8m0")
    """
    if scales not in ("float32", "ue8m0"):
        raise ValueError(f"quantize_blockwise() got scales={scales!r}; allowed: 'float32', 'ue8m0'")
    if not weight.is_floating_point() or weight.dtype.itemsize < 2 or weight.dim() not in (2, 3):
        raise ValueError(
            f"{name} has {weight.dtype} and shape {tuple(weight.shape)}; allowed: floating point "
            "of two bytes or more, [rows, columns] or [experts, rows, columns]"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"quantize_blockwise() got dtype={dtype}; allowed: floating point of two bytes or "
            "more, the type that the engine would get without FP8"
        )
    weight = weight.detach()
    weight_ERC = weight if weight.dim() == 3 else weight[None]
    experts, rows, columns = weight_ERC.shape
    codes_ERC = torch.empty(weight_ERC.shape, dtype=E4M3, device=weight.device)
    blocks = (experts, _blocks(rows), _blocks(columns))
    scale_Erc = torch.ones(blocks, dtype=torch.float32, device=weight.device)
    largest_Erc = torch.zeros_like(scale_Erc)
    on_triton = uses_triton(
        "quantize_blockwise()", weight.device, triton=triton, capability=_E4M3_CAPABILITY
    )
    by_triton = on_triton and weight.numel() > 0 and {weight.dtype, dtype} <= _KERNEL_TYPES
    if by_triton:
        from .triton_blockwise import launch_quantize

        into = codes_ERC, scale_Erc, largest_Erc
        launch_quantize(weight_ERC, *into, powers=scales == "ue8m0", dtype=dtype, block=BLOCK)
    for e, r, rows_of_slab in () if by_triton else _slabs(weight_ERC.shape):
        slab = weight_ERC[e, rows_of_slab].to(dtype)
        blocks_erKcK = _as_blocks(slab)
        largest = torch.maximum(blocks_erKcK.amax((2, 4)), -blocks_erKcK.amin((2, 4)))
        scale = _scale(largest, scales)
        blocks_erKcK.div_(scale[:, :, None, :, None])
        # Quotients are at most 464, so they are rounded to 448 or less, and none to NaN.
        values_ERC = blocks_erKcK.flatten(3, 4).flatten(1, 2)
        codes_ERC[e, rows_of_slab].copy_(values_ERC[:, : slab.shape[1], :columns])
        scale_Erc[e, r], largest_Erc[e, r] = scale, largest
    if not bool(largest_Erc.isfinite().all()):
        _refuse_not_finite(name, weight, dtype, largest_Erc)
    if weight.dim() == 2:
        return Blockwise(codes_ERC[0], scale_Erc[0])
    return Blockwise(codes_ERC, scale_Erc)


def dequantize_blockwise(
    codes: Tensor,
    scale_inv: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return the weight that codes and scales stand for: their product in float32, rounded to
    `dtype`.

    Args:
        codes: [..., R, C] of float8_e4m3fn.
        scale_inv: [..., ⌈R / 128⌉, ⌈C / 128⌉] of float32, or of float8_e8m0fnu.
        dtype: the type of the result.

    Raises:
        ValueError: shapes or types that do not fit each other.
    """
    if codes.dtype != E4M3 or codes.dim() not in (2, 3):
        raise ValueError(
            f"dequantize_blockwise() got codes of {codes.dtype} and shape {tuple(codes.shape)}; "
            f"allowed: {E4M3}, [rows, columns] or [experts, rows, columns]"
        )
    check_scale_shape("dequantize_blockwise()", codes, scale_inv)
    codes_ERC = codes if codes.dim() == 3 else codes[None]
    scale_Erc = scale_inv.float().view(codes_ERC.shape[0], *scale_inv.shape[-2:])
    weight_ERC = torch.empty(codes_ERC.shape, dtype=dtype, device=codes.device)
    for e, r, rows_of_slab in _slabs(codes_ERC.shape):
        slab = codes_ERC[e, rows_of_slab]
        blocks_erKcK = _as_blocks(slab)
        blocks_erKcK.mul_(scale_Erc[e, r][:, :, None, :, None])
        values_ERC = blocks_erKcK.flatten(3, 4).flatten(1, 2)
        weight_ERC[e, rows_of_slab].copy_(values_ERC[:, : slab.shape[1], : slab.shape[2]])
    return weight_ERC.view(codes.shape)


def check_scale_shape(caller: str, codes: Tensor, scale_inv: Tensor) -> None:
    """Raise `ValueError` unless there is one scale for each block of the codes."""
    expected = (*codes.shape[:-2], *map(_blocks, codes.shape[-2:]))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"{caller} got scales of shape {tuple(scale_inv.shape)} for codes of shape "
            f"{tuple(codes.shape)}; allowed: {expected}, one for each block of {BLOCK} × {BLOCK}"
        )


def check_cuts(name: str, rows: int, pieces: tuple[int, ...]) -> None:
    """Raise `ValueError` if a weight's pieces cut one of its blocks of 128 rows in two.
    The pieces are cut by rows. All of them but the last must have a multiple of 128 rows.

    They do if each piece but the last has a multiple of 128 rows. Otherwise the pieces have to be
    put together, or taken apart, before they are quantized: a block with rows of two pieces would
    get the scale of one of them.

    Args:
        name: the weight's name in errors.
        rows: the rows of the whole weight.
        pieces: the rows of each piece, such as tensor-parallel shards, or gate and up.

    Raises:
        ValueError: a cut within a block, or pieces that are not `rows` together.
    """
    if sum(pieces) != rows:
        raise ValueError(
            f"{name} has {rows} rows, and its pieces {pieces} have {sum(pieces)}: give the rows of "
            "all of its pieces"
        )
    cut = 0
    for piece in pieces[:-1]:
        cut += piece
        if cut % BLOCK:
            raise ValueError(
                f"{name} is cut at row {cut}, within a block of {BLOCK} rows: quantize after the "
                f"mapping to the engine's layout, or cut at multiples of {BLOCK}"
            )


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _slabs(shape: torch.Size) -> Iterator[tuple[slice, slice, slice]]:
    """Cut a weight [E, R, C] into parts of bounded size. Yield three slices for each part: its
    experts, its blocks of 128 rows, and the rows in these blocks.
    """
    experts, rows, columns = shape
    row_bytes = BLOCK * max(1, _blocks(columns)) * BLOCK * 4
    blocks_per_slab = max(1, _SLAB_BYTES // row_bytes)
    blocks = max(1, _blocks(rows))
    experts_per_slab = max(1, blocks_per_slab // blocks)
    for expert in range(0, experts, experts_per_slab):
        e = slice(expert, expert + experts_per_slab)
        for block in range(0, blocks, blocks_per_slab):
            r = slice(block, block + blocks_per_slab)
            yield e, r, slice(r.start * BLOCK, r.stop * BLOCK)


def _as_blocks(slab_ERC: Tensor) -> Tensor:
    """Return a float32 copy of a slab [E, R, C] as blocks of 128 × 128, in shape [E, r, 128, c,
    128]. R and C are first padded with zeros to multiples of 128.
    """
    experts, rows, columns = slab_ERC.shape
    shape = (experts, _blocks(rows) * BLOCK, _blocks(columns) * BLOCK)
    padded = torch.zeros(shape, dtype=torch.float32, device=slab_ERC.device)
    padded[:, :rows, :columns] = slab_ERC
    return padded.view(experts, _blocks(rows), BLOCK, _blocks(columns), BLOCK)


def _scale(largest: Tensor, scales: Scales) -> Tensor:
    if scales == "float32":
        # By a tensor: a GPU multiplies by the inverse of a number, which rounds otherwise.
        scale = largest / torch.full_like(largest, _LARGEST)
    else:
        # largest = m · 2ⁿ with m in [0.5, 1), and 464 = 0.90625 · 2⁹. The power is made of its
        # bits: `ldexp` takes what the device's `pow` says.
        fraction, exponent = torch.frexp(largest)
        exponent = exponent - 9 + (fraction > _ROUNDED_TO_LARGEST / 512).int()
        scale = ((exponent + 127).clamp(1, 254) << 23).view(torch.float32)
    return torch.where(largest > 0, scale.clamp(min=_SMALLEST_SCALE), 1.0)


def _refuse_not_finite(name: str, weight: Tensor, dtype: torch.dtype, largest_Erc: Tensor) -> None:
    """Raise `ValueError` with the index and value of a weight's first element that is not finite.

    It is called when there is one, and reads its block alone.
    """
    e, r, c = ((~largest_Erc.isfinite()).nonzero()[0]).tolist()
    block = (weight if weight.dim() == 3 else weight[None])[e][r * BLOCK :, c * BLOCK :]
    block = block[:BLOCK, :BLOCK].to(dtype)
    row, column = (~block.isfinite()).nonzero()[0].tolist()
    index = [r * BLOCK + row, c * BLOCK + column]
    index = index if weight.dim() == 2 else [e, *index]
    value = weight[tuple(index)].item()
    raise ValueError(
        f"{name} is {value} at {index}, {block[row, column].item()} as {dtype}, and a block "
        "needs finite values; find the step that made it, or give a dtype that holds it"
    )
