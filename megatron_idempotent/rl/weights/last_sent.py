"""Keeps a copy of the last sent weights, and computes deltas to it."""

from __future__ import annotations

from typing import Any

import torch

from .deltas import EncodedDelta, encode
from .records import DELTA, Bucket, TensorInfo, checksum


class LastSent:
    """Keeps a copy of the last sent weights in host memory, each tensor in the dtype in which it
    was sent, and computes the deltas from this copy to new weights.

    Example: `sent = last.changed(bucket, whole=False)`.
    """

    def __init__(self) -> None:
        self._tensors: dict[Any, torch.Tensor] = {}
        self._checksums: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """The number of bytes of all copies in host memory."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def keep(self, key: Any, new: torch.Tensor) -> None:
        """Replace the copy under `key` by a copy of `new` in host memory. The caller sends `new`, a
        tensor or a part of one, in full.
        """
        old = self._tensors.get(key)
        if old is None or TensorInfo.of("", old) != TensorInfo.of("", new):
            self._tensors[key] = new.detach().to("cpu", copy=True)
        else:
            old.copy_(new)

    def delta(self, key: Any, new: torch.Tensor, **sums: Any) -> EncodedDelta:
        """Return the delta from the copy under `key` to `new`, and write the changes into the copy.

        `sums` are further arguments of `deltas.encode`, such as known checksums.
        """
        return encode(new, self._tensors[key], write=True, **sums)

    def changed(self, bucket: Bucket, *, whole: bool) -> Bucket:
        """Return a bucket with only those tensors of `bucket` that differ from the last sent ones,
        as deltas where a delta is smaller. With `whole`, return `bucket` itself. Update the copies
        in both cases.
        """
        if whole:
            for name, tensor in bucket.tensors.items():
                self.keep(name, tensor)
            self._checksums.update(bucket.checksums)
            return bucket
        sent, checksums = {}, {}
        for name, tensor in bucket.tensors.items():
            old_sum = self._checksums[name]
            self._checksums[name] = bucket.checksums[name]
            if old_sum == bucket.checksums[name]:
                continue
            delta = self.delta(name, tensor, before=old_sum, after=bucket.checksums[name])
            if delta.nbytes < tensor.nbytes:
                sent[name + DELTA] = delta.data
                checksums[name + DELTA] = checksum(delta.data)
            else:
                sent[name], checksums[name] = tensor, bucket.checksums[name]
        return Bucket(index=bucket.index, tensors=sent, checksums=checksums)
