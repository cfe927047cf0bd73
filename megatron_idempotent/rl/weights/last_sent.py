"""Keeps what was sent last, and finds what has changed since."""

from __future__ import annotations

from typing import Any

import torch

from .deltas import EncodedDelta, encode
from .records import DELTA, Bucket, TensorInfo, checksum


class LastSent:
    """Keeps a copy of what was sent last, on the host, in the type in which it was sent.

    Example: `sent = last.changed(bucket, whole=False)`.
    """

    def __init__(self) -> None:
        self._tensors: dict[Any, torch.Tensor] = {}
        self._checksums: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """The number of bytes that are kept."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def keep(self, key: Any, new: torch.Tensor) -> None:
        """Copy a tensor, or a part of one, that is sent whole."""
        old = self._tensors.get(key)
        if old is None or TensorInfo.of("", old) != TensorInfo.of("", new):
            self._tensors[key] = new.detach().to("cpu", copy=True)
        else:
            old.copy_(new)

    def delta(self, key: Any, new: torch.Tensor, **known: Any) -> EncodedDelta:
        """Return what has changed since the last time, and copy it; `encode` has what is known."""
        return encode(new, self._tensors[key], write=True, **known)

    def changed(self, bucket: Bucket, *, whole: bool) -> Bucket:
        """Return the bucket as it is to be sent: tensors that changed, as deltas where smaller.

        `whole` says to send all of them, whole.
        """
        if whole:
            for name, tensor in bucket.tensors.items():
                self.keep(name, tensor)
            self._checksums.update(bucket.checksums)
            return bucket
        sent, checksums = {}, {}
        for name, tensor in bucket.tensors.items():
            before = self._checksums[name]
            self._checksums[name] = bucket.checksums[name]
            if before == bucket.checksums[name]:
                continue
            delta = self.delta(name, tensor, before=before, after=bucket.checksums[name])
            if delta.nbytes < tensor.nbytes:
                sent[name + DELTA] = delta.data
                checksums[name + DELTA] = checksum(delta.data)
            else:
                sent[name], checksums[name] = tensor, bucket.checksums[name]
        return Bucket(index=bucket.index, tensors=sent, checksums=checksums)
