"""Messages between `RayEngine` and its actor: buckets as bytes, answers, errors by name."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import torch

from megatron_idempotent.rollout import errors as engine_errors
from megatron_idempotent.weights import Bucket, TensorInfo
from megatron_idempotent.weights import errors as weights_errors

_CLASSES: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        engine_errors.EngineDead,
        engine_errors.EngineTimeout,
        engine_errors.EngineUnsupported,
        engine_errors.EngineError,
        weights_errors.UpdateMismatch,
        weights_errors.UpdateDamaged,
        weights_errors.UpdateRefused,
        weights_errors.WeightsError,
        ValueError,
    )
}
"""Errors that an engine's caller tells apart, the special ones before those they are kinds of."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of a call on the engine. Example: `answer.unwrap("engine-0")`."""

    value: Any = None
    kind: str = ""
    """Name of an error's class; "" where the call has returned."""
    message: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> Answer:
        """An error, in a form that needs none of the engine's own classes."""
        kind = next((name for name, known in _CLASSES.items() if isinstance(error, known)), "other")
        message = str(error) if kind != "other" else f"{type(error).__name__}: {error}"
        return cls(kind=kind, message=message, traceback="".join(traceback.format_exception(error)))

    def unwrap(self, name: str) -> Any:
        """The value. Errors: the error, of the same class; of others, an `EngineError`."""
        if not self.kind:
            return self.value
        known = _CLASSES.get(self.kind)
        if known is not None:
            raise known(self.message)
        raise engine_errors.EngineError(f"{name} raised {self.message}\n{self.traceback}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedBucket:
    """A bucket as arrays of bytes, which Ray passes on without a copy of its own; pickled tensors
    are copied three times. Example: `unpack(pack(bucket))`."""

    index: int
    tensors: tuple[tuple[TensorInfo, Any], ...]
    """Each with its bytes, a uint8 array."""
    checksums: dict[str, int]


def pack(bucket: Bucket) -> PackedBucket:
    """A bucket's bytes, in host memory."""
    return PackedBucket(
        index=bucket.index,
        tensors=tuple(
            (
                TensorInfo.of(name, tensor),
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
            )
            for name, tensor in bucket.tensors.items()
        ),
        checksums=dict(bucket.checksums),
    )


def unpack(packed: PackedBucket) -> Bucket:
    """The bucket, in memory of its own: what Ray hands out is shared and cannot be written."""
    tensors = {info.name: _tensor(info, data) for info, data in packed.tensors}
    return Bucket(index=packed.index, tensors=tensors, checksums=packed.checksums)


def _tensor(info: TensorInfo, data: Any) -> torch.Tensor:
    if not data.size:  # torch has no view of nothing in another type
        return torch.empty(info.shape, dtype=info.dtype)
    return torch.from_numpy(data.copy()).view(info.dtype).reshape(info.shape)
