"""A trainer's weights that change by a few elements at a time, and buckets that are damaged."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tiny import read_weights

from megatron_idempotent.rl.weights import Bucket, TensorInfo, checksum
from megatron_idempotent.rl.weights.records import DELTA


class Training:
    """A trainer's weights, a few of which change with each step; a source of them."""

    def __init__(self, folder: Any) -> None:
        self.weights = read_weights(folder)
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        for name, tensor in self.weights.items():
            chosen = torch.rand(tensor.shape, generator=self._generator) < 0.02
            self.weights[name] = torch.where(chosen, tensor * 1.01, tensor)

    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(name, each) for name, each in self.weights.items())

    def buckets(self, *, bucket_bytes: int) -> Any:
        for index, (name, tensor) in enumerate(self.weights.items()):
            yield Bucket.of(index, {name: tensor})


def flipped(bucket: Bucket, *, sealed: bool) -> Bucket:
    tensors = {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8).view(-1)[-1] ^= 4
    if sealed and not all(name.endswith(DELTA) for name in tensors):
        return bucket  # a whole tensor's checksum is the trainer's own
    checksums = {name: checksum(each) for name, each in tensors.items()}
    return dataclasses.replace(
        bucket, tensors=tensors, checksums=checksums if sealed else bucket.checksums
    )
