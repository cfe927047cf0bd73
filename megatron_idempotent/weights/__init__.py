"""Weights on their way to an engine: updates, buckets, checksums, and how they travel."""

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
