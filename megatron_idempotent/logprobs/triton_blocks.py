"""The block shapes of the Triton kernels: a short table to choose from.

The first of each is used until a benchmark has said otherwise: `python -m benchmarks.token_logprobs
--device cuda --tune` times all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

#: What a thread loads at once; loads of a warp are then 512 bytes that follow each other.
_LOAD_BYTES = 16
_WARP = 32


class Shape(NamedTuple):
    """Threads of a program, and how many loads each of them has in flight."""

    warps: int
    unroll: int
    stages: int
    """Tiles that are loaded ahead into shared memory; 1 leaves that to other programs."""
    segment: int = 32768
    """Columns of a program. The results' last bits depend on it."""
    lanes: int | None = None
    """Instead of what `warps` load at once."""

    def of(self, dtype: torch.dtype) -> Block:
        """The shape for rows of this type."""
        lanes = self.lanes or self.warps * _WARP * _LOAD_BYTES // dtype.itemsize
        return Block(self, lanes)


class Block(NamedTuple):
    """A shape for one type of logits."""

    shape: Shape
    lanes: int
    computed: torch.dtype = torch.float32

    def segments(self, columns: int) -> int:
        """Returns the number of programs that share a row."""
        return -(-columns // self.shape.segment)

    def constants(self) -> dict[str, Any]:
        """Returns the constants that the kernels are compiled for."""
        return {
            "SEGMENT": self.shape.segment,
            "UNROLL": self.shape.unroll,
            "LANES": self.lanes,
            "STAGES": self.shape.stages,
            "num_warps": self.shape.warps,
        }


Kernel = Literal["statistics", "gradient"]

#: A thread of 8 warps and 4 loads has 64 bytes in flight; 4 such programs fit a multiprocessor of
#: 64 Ki registers, 64 KiB in flight, several times what its share of the memory's latency takes.
SHAPES: dict[Kernel, tuple[Shape, ...]] = {
    "statistics": (Shape(8, 4, 1), Shape(8, 2, 1), Shape(4, 4, 1), Shape(8, 2, 3)),
    "gradient": (Shape(8, 2, 1), Shape(8, 4, 1), Shape(4, 4, 1), Shape(8, 2, 3)),
}
_chosen: dict[Kernel, Shape] = {kernel: shapes[0] for kernel, shapes in SHAPES.items()}


def block_of(kernel: Kernel, dtype: torch.dtype) -> Block:
    """The shape in use."""
    return _chosen[kernel].of(dtype)


@contextlib.contextmanager
def using(**shapes: Shape) -> Iterator[None]:
    """Use other shapes for a while: `using(statistics=Shape(4, 2, 1))`. For benchmarks, tests."""
    before = dict(_chosen)
    _chosen.update(shapes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _chosen.update(before)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make its GPU the current one, which Triton launches on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
