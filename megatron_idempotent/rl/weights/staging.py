"""Gathers and checks an update in an engine, next to the weights that are being served."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .records import (
    DELTA,
    Bucket,
    TensorInfo,
    UpdateDamaged,
    UpdateRefused,
    WeightsError,
    WeightUpdate,
    checksum,
    listed,
    refuse_misfits,
)

if TYPE_CHECKING:
    import torch

    from .deltas import Patch


class Staging:
    """Collects the tensors of one update as they arrive: checks and keeps them, without copies.

    A delta comes as uint8 under the tensor's name and `DELTA`. It is held to the checksums of both
    versions, and what it changes in the tensor that is served is kept as a `deltas.Patch`.

    Example:
        staging = Staging(update, expected=infos)
        for bucket in buckets:
            staging.add(bucket)
        weights = staging.complete()
    """

    def __init__(
        self,
        update: WeightUpdate,
        *,
        expected: Iterable[TensorInfo],
        served: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            update: the update that is staged.
            expected: every tensor of the engine's model, as the update is to bring them.
            served: returns a tensor as it is served; None for an engine that takes no deltas.
        """
        self.decode_s = 0.0
        """Seconds in which deltas were checked and decoded."""
        self._served = served
        self.update = update
        self._expected = {info.name: info for info in expected}
        self._tensors: dict[str, torch.Tensor | Patch] = {}
        self._buckets = 0

    def add(self, bucket: Bucket) -> None:
        """Check a bucket and keep its tensors; one that fails leaves nothing.

        Errors: `UpdateMismatch` for names, shapes and types that are not the model's;
            `UpdateDamaged` for a bucket out of turn, a tensor that came before, a checksum that is
            absent or differs; for deltas those of `deltas.verify`, and `UpdateRefused` if the
            update or the engine has no version that they build on.
        """
        if bucket.index != self._buckets:
            raise UpdateDamaged(
                f"update {self.update.id}: bucket {bucket.index} arrived, and bucket "
                f"{self._buckets} is next; send the update again from its first bucket"
            )
        self._check_fit(bucket.tensors)
        for name, tensor in bucket.tensors.items():
            if name.removesuffix(DELTA) in self._tensors:
                raise UpdateDamaged(
                    f"update {self.update.id}: {name} arrived twice; is it mapped twice?"
                )
            if name not in bucket.checksums:
                raise UpdateDamaged(
                    f"update {self.update.id}: {name} has no checksum; Bucket.of() makes one"
                )
            found = checksum(tensor)
            if found != bucket.checksums[name]:
                raise UpdateDamaged(
                    f"update {self.update.id}: {name} arrived with checksum {found:016x}, it was "
                    f"sent with {bucket.checksums[name]:016x}; send the update again"
                )
        self._tensors |= dict(map(self._decoded, bucket.tensors.items()))
        self._buckets += 1

    def complete(self) -> Mapping[str, Any]:
        """Return all tensors by name; for an update with a base version, those that came.

        Deltas are a `deltas.Patch` each, or the new tensor where that is smaller.

        Errors: `UpdateDamaged` naming the tensors that are missing.
        """
        missing = [name for name in self._expected if name not in self._tensors]
        if missing and self.update.base_version is None:
            raise UpdateDamaged(
                f"update {self.update.id}: {len(missing)} of {len(self._expected)} tensors are "
                f"missing: {listed(missing, ', ')}; send the update again, or name its base_version"
            )
        return self._tensors

    def _decoded(self, came: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor | Patch]:
        """Return the tensor's own name, and the tensor or what changes in it."""
        name, tensor = came[0].removesuffix(DELTA), came[1]
        if name == came[0]:
            return came
        from .deltas import EncodedDelta, verify

        started = time.perf_counter()
        try:
            if self._served is None or self.update.base_version is None:
                raise UpdateRefused("a delta came, and no version that it builds on is kept here")
            new = verify(EncodedDelta(tensor.cpu()), self._served(name))
        except WeightsError as error:
            raise type(error)(f"update {self.update.id}: {name}: {error}") from error
        self.decode_s += time.perf_counter() - started
        return name, new

    def _check_fit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        came = itertools.starmap(TensorInfo.of, tensors.items())
        refuse_misfits(self.update.id, came, self._expected)


class SideStream:
    """Runs copies on a CUDA stream of their own, beside the model's kernels.

    Copies neither wait for these kernels nor hold them up. On any other device they run on the
    current stream.

    Example:
        side = SideStream(weight.device)
        with side.complete():
            copy = weight.clone()
        # here the copy is complete, whatever the current stream is still computing
    """

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: the device that copies are on.
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
    """Return the tensor, and keep its memory until the current stream is done with it.

    The memory of a tensor that was made on a side stream goes back to that stream, which does not
    know of kernels of other streams that still read it.
    """
    if tensor.is_cuda:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
