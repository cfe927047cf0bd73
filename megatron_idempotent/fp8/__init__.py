"""Packs batches as FP8 kernels take them, and quantizes weights for engines. See docs/fp8.md."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
