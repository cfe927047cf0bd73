"""Collects and checks an update in an engine, which serves its current weights meanwhile."""

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
    """Collects and checks the tensors of one update in an engine as they arrive, without copying
    them.

    A delta is a uint8 tensor under the tensor's name with the suffix `DELTA`. It is checked with
    the checksums of both versions, and kept as a `deltas.Patch` of the served tensor.

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
        """Start without tensors; `add` collects the tensors of `update`, which must fit `expected`.

        Args:
            update: the update to stage.
            expected: every tensor of a full update.
            served: returns a served tensor by its name; None for an engine that takes no deltas.
        """
        self.decode_s = 0.0
        """Seconds that checking and decoding deltas took."""
        self._served = served
        self.update = update
        self._expected = {info.name: info for info in expected}
        self._tensors: dict[str, torch.Tensor | Patch] = {}
        self._buckets = 0

    def add(self, bucket: Bucket) -> None:
        """Check a bucket of the update, and keep the bucket's tensors; after an error, none of
        these tensors is kept.

        Raises:
            UpdateMismatch: names, shapes or dtypes differ from the model's.
            UpdateDamaged: the bucket is out of order, a tensor arrived twice, or a checksum is
                missing or differs.
            UpdateRefused: a delta arrived without a base version to apply it to.
            WeightsError: as in `deltas.verify`.
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
            actual = checksum(tensor)
            if actual != bucket.checksums[name]:
                raise UpdateDamaged(
                    f"update {self.update.id}: {name} arrived with checksum {actual:016x}, it was "
                    f"sent with {bucket.checksums[name]:016x}; send the update again"
                )
        self._tensors |= dict(map(self._decoded, bucket.tensors.items()))
        self._buckets += 1

    def complete(self) -> Mapping[str, Any]:
        """Check that no tensor is missing, and return the received tensors by name. An update with
        a base version may leave tensors out.

        A delta becomes a `deltas.Patch`, or the new tensor if that is smaller.

        Raises:
            UpdateDamaged: tensors are missing; the message lists them.
        """
        missing = [name for name in self._expected if name not in self._tensors]
        if missing and self.update.base_version is None:
            raise UpdateDamaged(
                f"update {self.update.id}: {len(missing)} of {len(self._expected)} tensors are "
                f"missing: {listed(missing, ', ')}; send the update again, or name its base_version"
            )
        return self._tensors

    def _decoded(self, came: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor | Patch]:
        """Return a received tensor unchanged, with its name. For a delta, check it against the
        served tensor that it changes, and return the patch or the new tensor to which it was
        decoded, with that tensor's name.
        """
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
    """Runs copies on a separate CUDA stream, concurrently with the model's kernels.

    On devices other than CUDA, copies run normally.

    Example:
        side = SideStream(weight.device)
        with side.complete():
            copy = weight.clone()
        # the copy is complete here, even if the current stream is busy
    """

    def __init__(self, device: torch.device) -> None:
        """Make a CUDA stream if `device` is a CUDA device; otherwise `complete` only runs its
        block.

        Args:
            device: the device of the copies.
        """
        import torch

        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    @contextlib.contextmanager
    def complete(self) -> Iterator[None]:
        """Run the kernels of the `with` block on the side stream, and block the host until they
        have ended.

        The block must not read memory that the current stream may still be writing, because it does
        not wait for that stream. Weights with checksums are safe: computing the checksum waited for
        them.
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
    """Record that the current CUDA stream uses a tensor, and return the tensor; if the tensor is
    not on a GPU, only return it.

    Otherwise the allocator may reuse the memory of a tensor from a side stream while kernels of
    other streams still read it.
    """
    if tensor.is_cuda:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
