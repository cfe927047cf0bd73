"""A worker with weights, in whose export every rank takes part."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.rl.hf.buckets import BucketStream
from megatron_idempotent.rl.sync.exports import Exports
from megatron_idempotent.rl.weights import TensorInfo

FACTORY = "export_worker:make"


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Four tensors; one is a transposed view, one of another type."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(64, 32, generator=generator) for name in ("a", "b", "c", "d")}
    return {**drawn, "b": drawn["b"].T, "d": drawn["d"].to(torch.bfloat16)}


def make(argument: dict[str, Any]) -> Worker:
    """`argument`: the seed of the weights, and faults."""
    return Worker(Source(**argument))


class Source:
    """A `WeightSource` whose every tensor is broadcast first, so that no rank may stay away."""

    def __init__(
        self,
        seed: int,
        fault: str = "",
        at: int = 2,
        rank: int = 0,
        finds_changes: bool = True,
        keepers: Sequence[int] = (0, 0, 0, 0),
    ) -> None:
        """Take `keepers`, which has the rank that keeps each tensor."""
        self.finds_changes, self.keepers = finds_changes, keepers
        self.keeps = dist.get_rank() in keepers
        self.tensors_by_name = weights(seed)
        self.fetched = 0
        self._fault, self._at, self._rank = fault, at, rank

    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(name, each) for name, each in self.tensors_by_name.items())

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> Iterator[Any]:
        """Yield what changed, which is the first tensor, without `whole`."""
        return BucketStream(
            [(info,) for info in self.tensors()[: None if whole else 1]],
            self._fetch,
            bucket_bytes=bucket_bytes,
            convert=self._convert,
            keepers=self.keepers[: None if whole else 1],
            rank=dist.get_rank(),
        )

    def _fetch(self, members: Sequence[int]) -> dict[str, torch.Tensor]:
        names = [list(self.tensors_by_name)[member] for member in members]
        for _ in names:
            dist.barrier()
            self.fetched += 1
        if self.fetched > self._at and dist.get_rank() == self._rank:
            if self._fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault == "silent":
                time.sleep(600)
        return {
            name: self.tensors_by_name[name]
            for member, name in zip(members, names, strict=True)
            if self.keepers[member] == dist.get_rank()
        }

    def _convert(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        for name, tensor in named:
            if self._fault == "raises" and self.fetched > self._at:
                self._fault = ""
                raise ValueError(f"{name} is not finite")
            yield name, tensor


class Worker(Exports):
    """Exports, and how far they came."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.source = source

    def change(self) -> None:
        """Change an element of one tensor."""
        self.source.tensors_by_name["c"][0, 0] += 1.0

    def fetched(self) -> int:
        """Tensors that this rank took part in."""
        return self.source.fetched
