"""Random numbers that belong to a token, not to a process: one uniform per (seed, place)."""

from __future__ import annotations

import torch

# SplitMix64 (Steele, Lea and Flood 2014), on int64 with wrap-around: the constants are its own,
# written as signed numbers because torch has no uint64 arithmetic.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's `>>` would copy the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def keyed_uniforms(*, seeds_B: torch.Tensor, places_B: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1) of shape [B], float64: a hash of (seed, place), one place each.

    For tokens whose sample is known by a seed of its own, as a `Request` is; `place` counts the
    tokens of the response from 0. Both are int64; `fold_seed` makes any int one.
    """
    state_B = _mix(seeds_B * _STEP + _MIX_1) + (places_B + 1) * _STEP
    return _shift_right(_mix(state_B), 11).to(torch.float64) * 2.0**-53


def fold_seed(seed: int) -> int:
    """The seed modulo 2**64, as a signed number: what fits an int64."""
    return (seed + 2**63) % 2**64 - 2**63
