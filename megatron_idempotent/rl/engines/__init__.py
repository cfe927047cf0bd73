"""Inference engines with one protocol: they sample responses and take new weights meanwhile."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
