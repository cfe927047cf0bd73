"""A checksum of a tensor's bytes that is computed where the tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Odd constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers: torch has no
# arithmetic on uint64, and int64 wraps around the same way.
_PLACE = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
#: Words of 8 bytes that are mixed at once: half a MB, so that the passes stay in the cache.
_WORDS = 1 << 16


def checksum(tensor: torch.Tensor) -> int:
    """Returns 64 bits, from 0 to 2**64 - 1, that tell two tensors' bytes apart, on any device.

    A sum over words of 8 bytes, each mixed with its place: integer arithmetic, so the same on
    every device and in every order. One changed word always changes it, other changes all but
    always. Shape and type do not count; compare them beside it. It guards against transmission
    errors and mix-ups, not against an adversary.

    Args:
        tensor: any shape and type. One that is not contiguous is copied first.
    """
    import torch  # here: who sends no tensor, such as a simulation, needs none

    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), bytes_N.numel(), dtype=torch.int64, device=bytes_N.device)
    if bytes_N.storage_offset() % 8:
        bytes_N = bytes_N.clone()  # a view in words must start at one
    whole = bytes_N.numel() // 8
    words_W = bytes_N[: whole * 8].view(torch.int64)
    places_W = torch.arange(min(_WORDS, whole + 1), device=bytes_N.device) * _PLACE
    for block, start in enumerate(range(0, whole, _WORDS)):
        # The odd factor tells blocks apart: within them places repeat.
        total += _mixed(words_W[start : start + _WORDS], places_W).sum() * (2 * block + 1)
    if whole * 8 < bytes_N.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=bytes_N.device)
        rest[: bytes_N.numel() - whole * 8] = bytes_N[whole * 8 :]
        total += _mixed(rest.view(torch.int64), places_W).sum() * -1
    return int(total) % 2**64


def _mixed(words_W: torch.Tensor, places_W: torch.Tensor) -> torch.Tensor:
    mixed_W = words_W ^ places_W[: len(words_W)]
    # torch's shifts repeat the sign: without the masks a word and its complement would be one.
    mixed_W.bitwise_xor_((mixed_W >> 32).bitwise_and_(2**32 - 1)).mul_(_MIX)
    return mixed_W.bitwise_xor_((mixed_W >> 29).bitwise_and_(2**35 - 1))
