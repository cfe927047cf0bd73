"""Samplers decide which groups start, which train next, and which are too old."""

from __future__ import annotations

from .checked import SamplerError, asked, checked_evict, checked_room, checked_select
from .first_ready import FirstReadySampler
from .in_order import InOrderSampler
from .load import load_sampler
from .windowed import StrictSampler, WindowedSampler

__all__ = [
    "FirstReadySampler",
    "InOrderSampler",
    "SamplerError",
    "StrictSampler",
    "WindowedSampler",
    "asked",
    "checked_evict",
    "checked_room",
    "checked_select",
    "load_sampler",
]
