"""Weights on their way to an engine: updates, buckets, checksums, and how they travel."""

from megatron_idempotent.missing import naming_the_remedy

with naming_the_remedy(__name__):
    from .checksum import checksum
    from .errors import UpdateDamaged, UpdateMismatch, UpdateRefused, WeightsError
    from .records import Bucket, TensorInfo, WeightSource, WeightUpdate
    from .staging import Staging

__all__ = [
    "Bucket",
    "Staging",
    "TensorInfo",
    "UpdateDamaged",
    "UpdateMismatch",
    "UpdateRefused",
    "WeightSource",
    "WeightUpdate",
    "WeightsError",
    "checksum",
]
