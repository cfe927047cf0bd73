"""Describes a bucket as JSON and one run of bytes, which ends with different torch understand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from megatron_idempotent.rl.weights.records import Bucket, TensorInfo, UpdateDamaged

#: Version of the announcements. Receivers refuse any other.
FORMAT = 1
#: Tensors begin at multiples of it, so that views in their type are aligned, for vector loads too.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """Describes the place of each tensor in the bytes of a bucket.

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
    """The number of bytes, gaps between tensors included."""

    @classmethod
    def of(cls, update_id: str, bucket: Bucket) -> BucketLayout:
        """Place the tensors one after the other, in the bucket's order."""
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
        """Return the JSON that `from_json` reads.

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
        """Return the layout that `as_json` described.

        Errors: `UpdateDamaged` if it is another update's, or anything in it is absent, malformed,
            or outside of the bucket's bytes.
        """
        where = f"update {update_id}: an announced bucket"
        if (found := announced.get("update")) != update_id:
            raise UpdateDamaged(
                f"{where} is of update {found!r}; open a receiver for that update and pass it there"
            )
        try:
            entries = announced["tensors"]
            layout = cls(
                update_id=update_id,
                index=int(announced["index"]),
                tensors=tuple(TensorInfo.from_json(entry) for entry in entries),
                offsets=tuple(int(entry["offset"]) for entry in entries),
                checksums={
                    str(entry["name"]): int(entry["checksum"], 16)
                    for entry in entries
                    if "checksum" in entry
                },
                nbytes=int(announced["nbytes"]),
            )
        except KeyError as error:
            raise UpdateDamaged(f"{where} lacks {error}; pass on what announce() gave") from error
        except (TypeError, ValueError) as error:
            raise UpdateDamaged(
                f"{where} cannot be read: {error}; pass on what announce() gave"
            ) from error
        layout._check(where)
        return layout

    def _check(self, where: str) -> None:
        names = [info.name for info in self.tensors]
        if len(set(names)) < len(names):
            raise UpdateDamaged(
                f"{where} lists a tensor twice, among {', '.join(sorted(names))}; pass on what "
                "announce() gave"
            )
        for info, offset in zip(self.tensors, self.offsets, strict=True):
            if any(not isinstance(size, int) or size < 0 for size in info.shape):
                raise UpdateDamaged(
                    f"{where} has {info.name} of shape {list(info.shape)}; sizes are integers, 0 "
                    "or more: pass on what announce() gave"
                )
            if not 0 <= offset <= offset + info.nbytes <= self.nbytes or offset % _ALIGNMENT:
                raise UpdateDamaged(
                    f"{where} has {info.name} at bytes {offset} to {offset + info.nbytes}: not a "
                    f"multiple of {_ALIGNMENT}, or outside of its {self.nbytes} bytes; pass on "
                    "what announce() gave"
                )

    def pack(self, tensors: Mapping[str, torch.Tensor], flat_N: torch.Tensor) -> None:
        """Copy tensors, of any device and strides, into at least `nbytes` bytes of type uint8."""
        for info, offset in zip(self.tensors, self.offsets, strict=True):
            _view(info, offset, flat_N).copy_(tensors[info.name].detach())

    def unpack(self, flat_N: torch.Tensor, *, device: torch.device | str = "cpu") -> Bucket:
        """Return the bucket, copied out of its bytes into tensors on a device."""
        return self.bucket(
            {
                info.name: _view(info, offset, flat_N).to(device, copy=True)
                for info, offset in zip(self.tensors, self.offsets, strict=True)
            }
        )

    def bucket(self, tensors: Mapping[str, torch.Tensor]) -> Bucket:
        """Return the bucket with these tensors, and the checksums that it was sent with."""
        return Bucket(index=self.index, tensors=tensors, checksums=self.checksums)


def _view(info: TensorInfo, offset: int, flat_N: torch.Tensor) -> torch.Tensor:
    return flat_N[offset : offset + info.nbytes].view(info.dtype).view(info.shape)


def read_tensor(descriptor: int, info: TensorInfo, offset: int) -> torch.Tensor:
    """Return a tensor out of an open file, in memory of its own.

    It reads the file and does not map it: a mapping of a file that shrinks kills the process that
    touches it. Errors: `EOFError` if the file ends before the tensor does; `OSError`.
    """
    tensor = torch.empty(info.shape, dtype=info.dtype)
    memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            raise EOFError(f"it ends at byte {offset + done}, within {info.name}")
        done += count
    return tensor
