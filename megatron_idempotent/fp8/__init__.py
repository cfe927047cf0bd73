"""Packs batches for FP8 kernels, and quantizes weights for engines. See docs/fp8.md."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
