"""Runs, splits and aborts training windows, for callers with a training loop of their own.

A window is all forward and backward calls whose gradients go into one optimizer step.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
