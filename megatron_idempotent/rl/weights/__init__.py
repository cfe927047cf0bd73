"""Describes weights on their way to an engine as updates, buckets and checksums, and moves them."""

from megatron_idempotent.lazy import naming_the_remedy

with naming_the_remedy(__name__):
    from .records import (
        Bucket,
        TensorInfo,
        UpdateDamaged,
        UpdateMismatch,
        UpdateRefused,
        WeightsError,
        WeightSource,
        WeightUpdate,
        checksum,
    )
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
