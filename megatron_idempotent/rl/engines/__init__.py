"""Drives engines, which sample responses and take new weights meanwhile, by one protocol."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
