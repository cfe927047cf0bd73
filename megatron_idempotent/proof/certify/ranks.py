"""Lets the ranks of a check exchange values and faults, beside the adapter's own collectives."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .protocol import Wrong


class Ranks:
    """Exchanges values and faults among all ranks, in a process group of its own. All ranks call
    its methods in the same order.

    Example: `Ranks().stop_at(None)`.
    """

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # A group of its own: an adapter may have left collectives of other groups half-way.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, and write the sum into the tensor on each rank. A
        collective.
        """
        # A method: cloudpickle takes `torch.distributed.config` along where a function names both.
        dist.all_reduce(tensor, group=self._group)

    def stop_at(self, fault: str | None) -> None:
        """Raise `Wrong` on every rank if any rank passes a `fault`; pass None for no fault. A
        collective: otherwise ranks would wait for one that has raised.
        """
        faults = [text for text in self.gather(fault) if text]
        if faults:
            raise Wrong(faults[0])

    def refused(self, refusal: str | None, event: str, action: str) -> bool:
        """Return True if every rank passes as `refusal` the message of an error by which it refused
        a step or a save; False if every rank passes None. A collective.

        Raises:
            Wrong: some ranks pass a refusal and others None. The message has `event`, the first
                rank that passes None, and `action`, what that rank does.
        """
        refusals = self.gather(refusal)
        if None in refusals and any(refusals):
            raise Wrong(f"{event}, and rank {refusals.index(None)} {action}")
        return None not in refusals

    def gather(self, value: Any) -> list[Any]:
        """Gather a picklable value of each rank; return the list in rank order. A collective."""
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, buffer.getvalue(), group=self._group)
        return [pickle.loads(data) for data in everybody]


def bits_of(value: Tensor) -> Tensor:
    """Return a tensor's bytes, as a tensor of type uint8."""
    return value.contiguous().view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles plain CPU tensors as raw bytes, because torch's own pickling is too slow."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not obj.numel():
            return NotImplemented
        return _unpickled, (bits_of(obj.detach().flatten()).numpy().tobytes(), obj.dtype, obj.shape)


def _unpickled(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
