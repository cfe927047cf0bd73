"""Sends new weights to engines while they serve, and switches to them in a short pause."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
