"""Describes weights on their way to an engine as updates, buckets and checksums, and moves them.

Importing this package does not import torch.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
