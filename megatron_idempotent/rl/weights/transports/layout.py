"""Describes a bucket as JSON and contiguous bytes, independently of the torch version."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_idempotent.rl.weights.records import (
    DELTA,
    Bucket,
    TensorInfo,
    UpdateDamaged,
    field,
    listed,
)

#: The version of announcements. Receivers reject any other.
FORMAT = 1
#: Tensors begin at multiples of this, so that views in their dtype are aligned, even for vector
#: loads.
_ALIGNMENT = 64
REMEDY = "pass on what announce() gave"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """Describes the bytes of a bucket: the name, shape, dtype, offset and checksum of each tensor.

    Example: `BucketLayout.of("run-7/12", bucket).pack(bucket.tensors, flat_N)`.
    """

    update_id: str
    index: int
    """The bucket's index."""
    tensors: tuple[TensorInfo, ...]
    offsets: tuple[int, ...]
    """The offset of each tensor, in bytes."""
    checksums: Mapping[str, int]
    nbytes: int
    """The number of bytes, including gaps between tensors."""

    @classmethod
    def of(cls, update_id: str, bucket: Bucket) -> BucketLayout:
        """Return a layout of a bucket's tensors, one after the other in the bucket's order."""
        tensors = tuple(TensorInfo.of(name, tensor) for name, tensor in bucket.tensors.items())
        offsets, end = [], 0
        for info in tensors:
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + info.nbytes
        return cls(
            update_id=update_id,
            index=bucket.index,
            tensors=tensors,
            offsets=tuple(offsets),
            checksums=dict(bucket.checksums),
            nbytes=end,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the layout as a JSON object, which `from_json` reads.

        Checksums are hexadecimal: JSON numbers lose bits above 2**53.
        """
        tensors = [
            {**info.as_json(), "offset": offset}
            for info, offset in zip(self.tensors, self.offsets, strict=True)
        ]
        for entry in tensors:
            if entry["name"] in self.checksums:
                entry["checksum"] = f"{self.checksums[entry['name']]:016x}"
        return {
            "update": self.update_id,
            "index": self.index,
            "nbytes": self.nbytes,
            "tensors": tensors,
        }

    @classmethod
    def from_json(cls, announced: Mapping[str, Any], *, update_id: str) -> BucketLayout:
        """Make a layout from the JSON object that `as_json` returned, after checking that the
        object belongs to the update `update_id`.

        Raises:
            UpdateDamaged: it belongs to another update, or a field is missing, malformed or outside
                of the bucket's bytes.
        """
        subject = f"update {update_id}: an announced bucket"
        if (update_of_bucket := field(announced, "update", str, subject, REMEDY)) != update_id:
            raise UpdateDamaged(
                f"{subject} is of update {update_of_bucket!r}; open a receiver for that update and "
                "pass it there"
            )
        entries = field(announced, "tensors", list, subject, REMEDY)
        tensors = tuple(TensorInfo.from_json(entry, subject, REMEDY) for entry in entries)
        checksums = {
            entry["name"]: field(entry, "checksum", str, subject, REMEDY)
            for entry in entries
            if "checksum" in entry
        }
        for name, text in checksums.items():
            if not re.fullmatch("[0-9a-f]{16}", text):
                raise UpdateDamaged(f"{subject} has {name} with checksum {text[:40]!r}; {REMEDY}")
        layout = cls(
            update_id=update_id,
            index=field(announced, "index", int, subject, REMEDY),
            tensors=tensors,
            offsets=tuple(field(entry, "offset", int, subject, REMEDY) for entry in entries),
            checksums={name: int(text, 16) for name, text in checksums.items()},
            nbytes=field(announced, "nbytes", int, subject, REMEDY),
        )
        layout._check(subject)
        return layout

    def _check(self, subject: str) -> None:
        names = [info.name for info in self.tensors]
        if len(set(names)) < len(names):
            raise UpdateDamaged(
                f"{subject} lists a tensor twice, among {listed(sorted(names), ', ')}; {REMEDY}"
            )
        for info, offset in zip(self.tensors, self.offsets, strict=True):
            if info.name.endswith(DELTA) and (info.dtype, len(info.shape)) != (torch.uint8, 1):
                raise UpdateDamaged(
                    f"{subject} has {info.name} as {info.describe()}, and a delta is uint8 "
                    f"[bytes]; {REMEDY}"
                )
            if offset + info.nbytes > self.nbytes or offset % _ALIGNMENT:
                raise UpdateDamaged(
                    f"{subject} has {info.name} at bytes {offset} to {offset + info.nbytes}: not a "
                    f"multiple of {_ALIGNMENT}, or outside of its {self.nbytes} bytes; {REMEDY}"
                )
        room = sum(-(-info.nbytes // _ALIGNMENT) * _ALIGNMENT for info in self.tensors)
        if self.nbytes > room:
            raise UpdateDamaged(
                f"{subject} has {self.nbytes} bytes, and its tensors fill {room} at most; {REMEDY}"
            )

    def pack(self, tensors: Mapping[str, torch.Tensor], flat_N: torch.Tensor) -> None:
        """Copy a bucket's tensors, of any device and strides, to their offsets in `flat_N`, a uint8
        tensor of at least `nbytes` bytes.
        """
        for info, offset in zip(self.tensors, self.offsets, strict=True):
            _view(info, offset, flat_N).copy_(tensors[info.name].detach())

    def unpack(self, flat_N: torch.Tensor, *, device: torch.device | str = "cpu") -> Bucket:
        """Copy the tensors from a bucket's bytes `flat_N` to a device, and return them as a
        bucket.
        """
        return self.bucket(
            {
                info.name: _view(info, offset, flat_N).to(device, copy=True)
                for info, offset in zip(self.tensors, self.offsets, strict=True)
            }
        )

    def bucket(self, tensors: Mapping[str, torch.Tensor]) -> Bucket:
        """Return a bucket with the given tensors, and this layout's index and checksums."""
        return Bucket(index=self.index, tensors=tensors, checksums=self.checksums)


def _view(info: TensorInfo, offset: int, flat_N: torch.Tensor) -> torch.Tensor:
    return flat_N[offset : offset + info.nbytes].view(info.dtype).view(info.shape)


def read_tensor(descriptor: int, info: TensorInfo, offset: int) -> torch.Tensor:
    """Read a tensor from an open file, at a byte offset, into new memory; return the tensor.

    It does not map the file, because reading a mapped file that shrinks kills the process.

    Raises:
        EOFError: the file ends within the tensor.
        OSError: the file cannot be read.
    """
    tensor = torch.empty(info.shape, dtype=info.dtype)
    memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    filled = 0
    while filled < len(memory):
        count = os.preadv(descriptor, [memory[filled:]], offset + filled)
        if count == 0:
            raise EOFError(f"it ends at byte {offset + filled}, within {info.name}")
        filled += count
    return tensor


def read_bucket(
    path: pathlib.Path,
    layout: BucketLayout,
    *,
    file_bytes: int,
    offsets_in: Callable[[int], Sequence[int]],
) -> Bucket:
    """Read the tensors of a bucket from a file, and return them as a bucket.

    Args:
        path: the file, in a directory that the sender shares.
        layout: the bucket's layout.
        file_bytes: the announced size of the file.
        offsets_in: returns each tensor's offset in the file, given the open file's descriptor.

    Raises:
        UpdateDamaged: the file is absent, cannot be read, or has another size.
    """
    subject = f"update {layout.update_id}: {path}"
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != file_bytes:
                raise EOFError(f"it has {size} bytes, {file_bytes} were announced")
            tensors = {
                info.name: read_tensor(file.fileno(), info, offset)
                for info, offset in zip(layout.tensors, offsets_in(file.fileno()), strict=True)
            }
    except FileNotFoundError as error:
        raise UpdateDamaged(
            f"{subject} is absent; does this worker share {path.parent} with the trainer, and is "
            "the update still open?"
        ) from error
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UpdateDamaged(f"{subject} cannot be read: {error}; send the update again") from error
    return layout.bucket(tensors)
