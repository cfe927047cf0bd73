"""Judges a framework's training step against its definition, on CPU ranks, in every layout."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
