"""Weights in transit to an engine: updates, buckets, checksums, deltas and transports.

Importing this package does not import torch.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
