"""Copies of weights on a CUDA stream of their own, beside a model that serves or trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class SideStream:
    """A CUDA stream for copies, which neither wait for the model's kernels nor hold them up.

    On any other device nothing differs from the current stream.

    Example:
        side = SideStream(weight.device)
        with side.complete():
            copy = weight.clone()
        # here the copy is complete, whatever the current stream is still computing
    """

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: where the copies are.
        """
        import torch

        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    @contextlib.contextmanager
    def complete(self) -> Iterator[None]:
        """Run the block's kernels on the stream, and wait on the host until they have ended.

        The block reads nothing that the current stream may still be writing: it does not wait for
        that. Weights with checksums are complete, since reading a checksum waited for them.
        """
        if self._stream is None:
            yield
            return
        import torch

        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory nobody gets before the current stream is done with it.

    A tensor that was made on a side stream goes back to that stream's memory, which does not know
    of kernels of other streams that still read it.
    """
    if tensor.is_cuda:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
