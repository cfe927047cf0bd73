"""Implements one protocol for inference engines, which sample while new weights arrive."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
