"""Sends new weights to serving engines: stages them beside the old ones, and swaps in a pause."""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
