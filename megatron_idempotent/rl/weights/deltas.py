"""Encodes the elements of a tensor whose bits changed, and writes them into the old tensor.

A delta is a sequence of bytes, little-endian, the same in memory, in a file and over a network:

| bytes | content |
|---|---|
| 4 | `WDL1` |
| 1 | bytes of an element: 1, 2, 4 or 8 |
| 8, 8 | number of elements of the tensor, and number of changed elements |
| 8, 8 | `checksum()` of the tensor before and after |
| | for each block of 2**19 elements: a list of the changed positions, then the differences |

A difference is new - old, with the bits of each element read as a signed integer. Most changes of
an optimizer step move a bfloat16 weight to the next representable number: a difference of 1 or -1.
The differences of a block begin with a sign bit per change, lowest bit first: 1 for a difference
below 0. Then, for each byte of |difference| - 1, the lowest byte first, there is a list of the
changes whose byte is not 0, followed by these bytes.

A list of positions begins with one byte for its format, 4 bytes for the number of positions and 4
bytes for the size of the rest in bytes. The formats are: 0, all positions; 1, a bitmap, lowest bit
first; 2 and 3, the first position and then the distance of each position from the previous one, as
unsigned integers of 1 and 2 bytes. A distance that does not fit is stored as the largest integer
(all bits 1), and its remainder is stored after the integers of all distances; a remainder that does
not fit is split in the same way. The encoder chooses the format by the number of positions and
their distances.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .records import (
    DELTA_HEADER,
    Part,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    checksum,
    in_host_memory,
    word_blocks,
    words_share,
)

# Format strings, because a `struct.Struct` cannot be pickled with functions that are pickled by
# value.
_PLACES = "<BII"
_HEADER_BYTES, _PLACES_BYTES = struct.calcsize(DELTA_HEADER), struct.calcsize(_PLACES)
_MAGIC = b"WDL1"
CODEC = _MAGIC.decode()
"""The name of the encoding, for manifests that list deltas."""
_ALL, _BITMAP = 0, 1
#: For formats 2 and 3: the integer type of a distance, and its largest value.
_UNITS = {2: ("<u1", 255), 3: ("<u2", 65535)}
_ITEMSIZES = 1, 2, 4, 8
_BLOCK = 1 << 19
#: The number of elements that a device compares or changes in one operation: 8 blocks. The host
#: waits for each of these operations.
_ON_DEVICE = 8 * _BLOCK


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EncodedDelta:
    """Holds the bytes of a delta, i.e. the encoded changes of one tensor. The bytes may be damaged
    until `verify` has checked them.

    Example: `EncodedDelta(torch.frombuffer(content, dtype=torch.uint8))`.
    """

    data: torch.Tensor
    """uint8 [bytes], on the host."""

    def __post_init__(self) -> None:
        """Raise `UpdateDamaged` unless the bytes begin with the header of a delta."""
        size = self.data.numel()
        if size < _HEADER_BYTES or bytes(self._bytes[:4]) != _MAGIC:
            raise UpdateDamaged(
                f"{size} bytes are no delta: they do not begin with {_MAGIC!r} and a header; send "
                "it again"
            )
        if self.itemsize not in _ITEMSIZES:
            raise UpdateDamaged(f"a delta is of elements of {self.itemsize} bytes; send it again")

    @property
    def _bytes(self) -> Any:
        return self.data.numpy()

    @property
    def _header(self) -> tuple[Any, ...]:
        return struct.unpack_from(DELTA_HEADER, self._bytes)

    @property
    def itemsize(self) -> int:
        """The number of bytes of one element of the tensor to which the delta applies."""
        return int(self._header[1])

    @property
    def elements(self) -> int:
        """The number of elements of the tensor to which the delta applies."""
        return int(self._header[2])

    @property
    def changed(self) -> int:
        """The number of elements that the delta changes."""
        return int(self._header[3])

    @property
    def before(self) -> int:
        """The checksum of the tensor to which the delta applies."""
        return int(self._header[4])

    @property
    def after(self) -> int:
        """The checksum of the tensor after the delta is applied."""
        return int(self._header[5])

    @property
    def nbytes(self) -> int:
        """The delta's size in bytes."""
        return self.data.numel()

    def undo(self) -> EncodedDelta:
        """Return the inverse delta, which changes the new tensor back to the old one."""
        return _joined([self], self.after, self.before, sign=-1)

    def places(self) -> tuple[Any, Any]:
        """Return the positions of the changed elements, ascending int64 [K], and the differences
        new - old at these positions, signed [K].

        The result may need up to 128 times the memory of the delta: use `blocks` for a delta from
        another process.

        Raises:
            UpdateDamaged: the bytes after the header do not fit the header.
        """
        blocks = [(at_K + start, by_K) for start, at_K, by_K in self.blocks()]
        none = np.empty(0, np.int64), np.empty(0, f"i{self.itemsize}")
        at_K, by_K = map(np.concatenate, zip(none, *blocks, strict=True))
        return at_K, by_K

    def pieces(self, blocks: int) -> Iterator[tuple[int, Any, Any]]:
        """Decode the delta in groups of `blocks` consecutive blocks, which are ranges of the
        tensor's elements (see the method `blocks`). Yield for each group the index of its first
        element, the changed positions counted from there, int64 [K], and the differences new - old
        at these positions.
        """
        left = self.blocks()
        while some := list(itertools.islice(left, blocks)):
            start = some[0][0]
            at_K = np.concatenate([at_K + (first - start) for first, at_K, _ in some])
            yield start, at_K, np.concatenate([by_K for *_, by_K in some])

    def blocks(self) -> Iterator[tuple[int, Any, Any]]:
        """Decode the delta block by block, a block being a range of the tensor's elements. Yield
        for each block the index of its first element, the changed positions counted from there,
        int64 [K], and the differences new - old at these positions.

        Raises:
            UpdateDamaged: as in `places`; sizes that do not add up are detected after the last
                block.
        """
        data, end, changed = self._bytes, _HEADER_BYTES, 0
        for start in range(0, self.elements, _BLOCK):
            at_K, count, end = _read_places(data, end, min(_BLOCK, self.elements - start))
            if not count:
                yield start, at_K, np.empty(0, f"<i{self.itemsize}")
                continue
            signs, end = _taken(data, end, -(-count // 8))
            less_K = np.unpackbits(signs, count=count, bitorder="little").view(np.int8)
            by_K = np.zeros(count, f"<i{self.itemsize}")
            for byte in range(self.itemsize):
                there, number, end = _read_places(data, end, count)
                values, end = _taken(data, end, number)
                if number:
                    by_K.view(np.uint8)[byte :: self.itemsize][there] = values
            by_K ^= -less_K  # ~(-d - 1) is d
            by_K += 1 - less_K
            changed += count
            if changed > self.changed:
                break
            yield start, at_K, by_K
        if (end, changed) != (len(data), self.changed):
            raise UpdateDamaged(
                f"a delta of {len(data)} bytes and {self.changed} changes has {changed} in {end} "
                "bytes; send it again"
            )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """Holds new values for some elements of a tensor; `write` puts them into the tensor.

    The positions, int64 [K], and the bits of the new values, as integers [K], are NumPy arrays if
    the tensor is on the host, else torch tensors on its device.

    Example: `patch.reverse()` before it is written.
    """

    tensor: torch.Tensor
    at_K: Any
    new_K: Any

    def write(self) -> None:
        """Write the new values into the tensor in place. A second call is a no-op."""
        flat_N, at_K, new_K = _there(self.tensor, self.at_K, self.new_K)
        flat_N[at_K] = new_K

    def reverse(self) -> Patch:
        """Return a patch that restores the values that the tensor has now at these positions; call
        this method before `write`.
        """
        flat_N, at_K, _ = _there(self.tensor, self.at_K, self.new_K)
        return Patch(self.tensor, at_K, flat_N[at_K])

    def made(self) -> torch.Tensor:
        """Return a copy of the tensor with the new values; the tensor is unchanged."""
        new = dataclasses.replace(self, tensor=self.tensor.clone())
        new.write()
        return new.tensor


def _there(tensor: torch.Tensor, at_K: Any, by_K: Any) -> tuple[Any, Any, Any]:
    """Return the bits of a contiguous tensor as a flat view [N] with the integer type of `by_K`;
    also return `at_K` and `by_K` on the tensor's device.

    All three are NumPy arrays for a tensor on the host, torch tensors otherwise.
    """
    bytes_N = tensor.detach().reshape(-1).view(torch.uint8)
    if in_host_memory(bytes_N):
        return bytes_N.numpy().view(by_K.dtype), at_K, by_K
    at_K, by_K = (torch.as_tensor(each).to(tensor.device) for each in (at_K, by_K))
    return bytes_N.view(by_K.dtype), at_K, by_K


def encode(
    new: torch.Tensor,
    old: torch.Tensor,
    *,
    before: int | None = None,
    after: int | None = None,
    part: Part | None = None,
    write: bool = False,
) -> EncodedDelta:
    """Return the delta that changes `old` to `new`, with the elements whose bits differ. With
    `write`, also write these changes into `old`.

    Args:
        new: a tensor of any shape and device, with elements of 1, 2, 4 or 8 bytes. If it is on a
            device, blocks of `old` are copied there, and only the changes are copied back.
        old: a tensor of the same shape and dtype, on the host or on the device of `new`.
        before: `checksum(old)`, if the caller knows it.
        after: `checksum(new)`, if the caller knows it.
        part: the range of a larger tensor that `new` is, on boundaries of 8-byte words. The delta's
            `after` is then the contribution of `new` to the larger tensor's checksum, without the
            term for the number of bytes.
        write: True to write the changes into `old`, which must be contiguous and on the host.

    Raises:
        ValueError: the tensors differ in shape or dtype, are on two different devices, or `old`
            cannot be written.
    """
    told = [(tuple(each.shape), each.dtype, each.device) for each in (new, old)]
    alike = told[0][:2] == told[1][:2] and (old.is_cpu or old.device == new.device)
    if not alike or new.dtype.itemsize not in _ITEMSIZES:
        raise ValueError(
            f"encode() got {told[0]} and {told[1]}; give two tensors of one shape and type, with "
            f"{', '.join(map(str, _ITEMSIZES))} bytes an element, the old one on the host or "
            "where the new one is"
        )
    if write and not (old.is_cpu and old.is_contiguous()):
        raise ValueError(
            f"encode(write=True) got an old tensor on {old.device} with strides {old.stride()} for "
            f"shape {tuple(old.shape)}, and writes into memory on the host without gaps: give one "
            "that is contiguous there, or write=False"
        )
    new_N, old_N = new.detach().contiguous().reshape(-1), _bits(old.cpu())
    before = checksum(old) if before is None else before
    size = _BLOCK if in_host_memory(new) else _ON_DEVICE
    room_P = np.empty(min(size, len(old_N)), old_N.dtype)
    shares = [0 if part else new.nbytes]

    def piece(start: int) -> Iterator[tuple[int, list[Any]]]:
        new_P, old_P = new_N[start : start + size], old_N[start : start + size]
        at_K, by_K = _differences(new_P, old_P, room_P[: len(old_P)])
        if write:
            old_P[at_K] += by_K
        if after is None:  # computed here, while the block is in the processor's cache
            shares.append(_share(new_P, start, part))
        return _blocks(at_K, by_K, len(old_P))

    sealed = [block for start in range(0, len(old_N), size) for block in piece(start)]
    after = sum(shares) % 2**64 if after is None else after
    return _sealed(sealed, (new.dtype.itemsize, len(old_N)), before, after)


def verify(encoded: EncodedDelta, tensor: torch.Tensor) -> Patch | torch.Tensor:
    """Check a delta against the tensor that it changes, and decode the delta to a patch, or to the
    complete new tensor if a patch would be as large. The tensor is unchanged.

    The result is the new tensor if a patch would be larger than the tensor, and the tensor itself
    if it already has the new values. The checksum of the new values must equal that of the tensor
    from which the delta was encoded.

    Raises:
        UpdateMismatch: the tensor has another size, or is not contiguous.
        UpdateRefused: the tensor does not have the bits that the delta builds on.
        UpdateDamaged: the delta's bytes are not those that were encoded.
    """
    if (tensor.numel(), tensor.dtype.itemsize) != (encoded.elements, encoded.itemsize):
        raise UpdateMismatch(
            f"a delta of {encoded.elements} elements of {encoded.itemsize} bytes came for a tensor "
            f"of {tensor.numel()} elements of {tensor.dtype.itemsize} bytes; send every tensor"
        )
    if not tensor.is_contiguous():
        raise UpdateMismatch(
            f"a delta came for a tensor with strides {tensor.stride()}, which is written in "
            "place; give one that is contiguous"
        )
    old_N, made = tensor.detach().reshape(-1), tensor.nbytes
    whole = encoded.changed * (8 + encoded.itemsize) >= tensor.nbytes
    size = _BLOCK if in_host_memory(tensor) else _ON_DEVICE
    room_N = torch.empty_like(old_N if whole else old_N[:size])
    found = []
    for start, at_K, by_K in encoded.pieces(size // _BLOCK):
        old_P = old_N[start : start + size]
        new_P = room_N[start if whole else 0 :][: len(old_P)].copy_(old_P)
        flat_P, at_K, new_K = _there(new_P, at_K, by_K)
        new_K += flat_P[at_K]
        flat_P[at_K] = new_K
        made += _share(new_P, start)
        if not whole:
            at_K += start
            found.append((at_K, new_K))
    made %= 2**64
    if made == encoded.after:
        if whole:
            return room_N.view(tensor.shape)
        at, new = zip(*found, strict=True)
        cat: Any = np.concatenate if in_host_memory(tensor) else torch.cat
        return Patch(tensor, cat(at), cat(new))
    before = checksum(tensor)
    if before == encoded.after:
        return tensor.detach()
    if before != encoded.before:
        raise UpdateRefused(
            f"a delta for a tensor with checksum {encoded.before:016x} came to one with "
            f"{before:016x}: an update was lost, or is another run's; send every tensor"
        )
    raise UpdateDamaged(
        f"a delta makes a tensor with checksum {made:016x}, and it was made of one with "
        f"{encoded.after:016x}; send the tensor whole"
    )


def apply(encoded: EncodedDelta, tensor: torch.Tensor) -> None:
    """Apply a delta to a tensor in place; the tensor is unchanged if `verify` raises.

    A second call is a no-op.

    Raises:
        Exception: as in `verify`.
    """
    made = verify(encoded, tensor)
    if isinstance(made, Patch):
        made.write()
    else:
        tensor.detach().copy_(made)


def join(deltas: Sequence[EncodedDelta]) -> EncodedDelta:
    """Join consecutive deltas of a tensor into one delta, which changes the tensor before the first
    delta to the tensor after the last one.

    Raises:
        ValueError: `deltas` is empty.
        UpdateDamaged: a delta does not build on the result of the previous one, or is malformed.
    """
    if not deltas:
        raise ValueError("join() got no deltas; give at least one")
    for one, other in itertools.pairwise(deltas):
        told = (one.after, one.elements, one.itemsize)
        if told != (other.before, other.elements, other.itemsize):
            raise UpdateDamaged(
                f"a delta for {other.elements} elements of {other.itemsize} bytes with checksum "
                f"{other.before:016x} follows one that makes {one.elements} of {one.itemsize} with "
                f"{one.after:016x}: an update is missing between them; send every tensor"
            )
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first
    return _joined(deltas, first.before, last.after)


def merged(deltas: Sequence[tuple[Part, EncodedDelta]], *, before: int, after: int) -> EncodedDelta:
    """Merge the deltas of a tensor's parts into one delta of the entire tensor.

    `before` and `after` are the checksums of the entire tensor.

    Raises:
        ValueError: `deltas` is empty.
    """
    if not deltas:
        raise ValueError("merged() got no deltas; give at least one")
    (part, first), *more = deltas
    elements = math.prod(part.shape)
    if not more and first.elements == elements:  # only the checksums in the header differ
        data = first.data.clone()
        kind = first.itemsize, elements, first.changed
        struct.pack_into(DELTA_HEADER, data.numpy(), 0, _MAGIC, *kind, before, after)
        return EncodedDelta(data)
    placed = [(each, *delta.places()) for each, delta in deltas]
    found = [(each.of(at_K), by_K) for each, at_K, by_K in placed]
    return _united(found, elements, before, after)


def _joined(
    deltas: Sequence[EncodedDelta], before: int, after: int, *, sign: int = 1
) -> EncodedDelta:
    """Add up several deltas of one tensor, multiply the sum by `sign`, and return it as one delta,
    with the checksums `before` and `after` in its header. One block at a time is computed, to bound
    the memory.
    """
    elements, itemsize = deltas[0].elements, deltas[0].itemsize
    sealed = []
    for parts in zip(*(each.blocks() for each in deltas), strict=True):
        at_U, by_U = _summed([(at_K, by_K * sign) for _, at_K, by_K in parts])
        sealed.append(_block(at_U, by_U, min(_BLOCK, elements - parts[0][0])))
    return _sealed(sealed, (itemsize, elements), before, after)


def _united(
    found: Sequence[tuple[Any, Any]], elements: int, before: int, after: int
) -> EncodedDelta:
    """Add up several sets of changes of one tensor, each a pair of positions and differences, and
    encode the sums as one delta.
    """
    at_U, by_U = _summed(found)
    return _sealed(_blocks(at_U, by_U, elements), (by_U.itemsize, elements), before, after)


def _summed(found: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Add up several sets of changes, each a pair of positions and differences, by summing the
    differences at equal positions. Return the positions whose sum is not 0, ascending, and these
    sums.
    """
    at_K, by_K = map(np.concatenate, zip(*found, strict=True))
    order_K = np.argsort(at_K, kind="stable")
    at_K, by_K = at_K[order_K], by_K[order_K]
    starts_U = np.flatnonzero(np.diff(at_K, prepend=-1))
    # reduceat() rejects an empty array.
    by_U = np.add.reduceat(by_K, starts_U, dtype=by_K.dtype) if len(starts_U) else by_K
    return at_K[starts_U][by_U != 0], by_U[by_U != 0]


def _bits(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor on the host as NumPy's signed integers, one per element, [N]."""
    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes_N.numpy().view(f"<i{tensor.dtype.itemsize}")


def _share(new_B: torch.Tensor, start: int, part: Part | None = None) -> int:
    """Return how much the elements `new_B` of a tensor contribute to the tensor's checksum. They
    are consecutive in the tensor, from element `start` on, or with `part` in that part of the
    tensor.

    With `part`, `start` counts from the beginning of the part, and the checksum is the one of the
    complete tensor.
    """
    itemsize = new_B.dtype.itemsize
    first = start * itemsize // 8
    return sum(
        part.words_share(first + each, words_W, itemsize)
        if part
        else words_share(first + each, words_W)
        for each, words_W in word_blocks(new_B)
    )


def _sealed(
    blocks: Iterable[tuple[int, list[Any]]], kind: tuple[int, int], before: int, after: int
) -> EncodedDelta:
    """Assemble a delta from a header and encoded blocks, each as `_block` returns it. `kind` is the
    number of bytes per element, and the number of elements of the tensor.
    """
    counts, parts = zip((0, []), *blocks, strict=True)
    header = struct.pack(DELTA_HEADER, _MAGIC, *kind, sum(counts), before, after)
    data = bytearray().join([header, *itertools.chain(*parts)])
    return EncodedDelta(torch.frombuffer(data, dtype=torch.uint8))


def _blocks(at_K: Any, by_K: Any, count: int) -> Iterator[tuple[int, list[Any]]]:
    """Encode the changes of a tensor of `count` elements block by block; yield what `_block`
    returns for each block.
    """
    starts = range(0, count, _BLOCK)
    edges = *np.searchsorted(at_K, starts), len(at_K)
    for start, low, high in zip(starts, edges, edges[1:], strict=False):
        yield _block(at_K[low:high] - start, by_K[low:high], min(_BLOCK, count - start))


def _block(at_K: Any, by_K: Any, count: int) -> tuple[int, list[Any]]:
    """Encode the changes in a block of `count` elements. Return the number of changes, and their
    encoding as a list of byte arrays.
    """
    told = _places(at_K, count)
    if len(by_K):
        less_K = by_K >> (8 * by_K.itemsize - 1)  # -1 or 0
        size_K = (by_K ^ less_K) - less_K - 1
        told.append(np.packbits(by_K < 0, bitorder="little"))
        largest = int(size_K.view(f"u{size_K.itemsize}").max())
        for byte in range(by_K.itemsize):
            if largest < 256**byte:
                told += _places(at_K[:0], len(by_K))
                continue
            plane_K = np.ascontiguousarray(size_K.view(np.uint8)[byte :: by_K.itemsize])
            there_K = plane_K != 0
            at_M = there_K.nonzero()[0]
            listed, values = _places(at_M, len(plane_K), there_K), plane_K[at_M]
            if sum(map(len, listed)) + len(values) >= len(plane_K) + _PLACES_BYTES:
                listed, values = [struct.pack(_PLACES, _ALL, len(plane_K), 0)], plane_K
            told += [*listed, values]
    return len(by_K), told


def _differences(new_N: torch.Tensor, old_N: Any, room_N: Any) -> tuple[Any, Any]:
    """Compare a tensor with its old version; return the positions at which their bits differ, and
    new - old there.

    `room_N` is memory for the differences on the host.
    """
    if in_host_memory(new_N):
        return _nonzero(np.subtract(_bits(new_N), old_N, out=room_N))
    there_N = torch.from_numpy(old_N).to(new_N.device)
    by_N = new_N.view(torch.uint8).view(there_N.dtype) - there_N
    at_K = by_N.nonzero().reshape(-1)
    return at_K.cpu().numpy(), by_N[at_K].cpu().numpy()


def _nonzero(by_N: Any) -> tuple[Any, Any]:
    """Return the positions of the numbers that are not 0, int64 [K], and these numbers, [K]."""
    there_N = by_N != 0
    padded_N = there_N if len(there_N) % 8 == 0 else np.append(there_N, [False] * 7)
    eights_E = padded_N[: len(padded_N) & -8].view(np.uint64)
    # First find the groups of eight with a number that is not 0, then the numbers inside of these
    # groups: for rare changes this is faster than `nonzero` on all numbers.
    at_E = (eights_E != 0).nonzero()[0]
    if len(at_E) * 4 > len(eights_E) * 3:
        at_K = there_N.nonzero()[0]
    else:
        inside_K = eights_E[at_E].view(bool).nonzero()[0]
        at_K = at_E[inside_K >> 3]
        at_K <<= 3
        at_K += inside_K & 7
    return at_K, by_N[at_K]


def _places(at_K: Any, count: int, there_N: Any = None) -> list[Any]:
    """Encode a list of positions, int64 [K], each below `count`, as a delta stores them; return a
    list of byte arrays.

    `there_N` are the same positions as bool [count], if the caller has them.
    """
    number = len(at_K)
    form, content = 2, np.empty(0, np.uint8)
    if number == count:
        form = _ALL
    elif number * 8 >= count:
        if there_N is None:
            there_N = np.zeros(count, bool)
            there_N[at_K] = True
        form, content = _BITMAP, np.packbits(there_N, bitorder="little")
    elif number:
        steps_K = at_K.copy()
        steps_K[1:] -= at_K[:-1]
        for form, (unit, goes_on) in _UNITS.items():  # noqa: B007 (the last of them is used)
            far_F = (steps_K >= goes_on).nonzero()[0]
            if int((steps_K[far_F] // goes_on).sum()) <= number:
                break
        units = []
        while len(steps_K):
            units.append(steps_K.astype(unit))
            units[-1][far_F] = goes_on
            steps_K = steps_K[far_F] - goes_on
            far_F = (steps_K >= goes_on).nonzero()[0]
        content = np.concatenate(units).view(np.uint8)
    return [struct.pack(_PLACES, form, number, len(content)), content]


def _read_places(data: Any, start: int, count: int) -> tuple[Any, int, int]:
    """Decode the list of positions, each below `count`, that begins at byte `start` of a delta.
    Return the positions, their number, and the offset after the list.

    Returns:
        The positions, their number, and the offset of the byte after the list.

    Raises:
        UpdateDamaged: the list is malformed or truncated.
    """
    head, start = _taken(data, start, _PLACES_BYTES)
    form, number, size = struct.unpack(_PLACES, head)
    content, end = _taken(data, start, size)
    at_K = np.empty(0, np.int64)
    if form == _ALL:
        at_K = np.arange(count)
    elif form == _BITMAP and size == -(-count // 8):
        at_K = np.unpackbits(content, count=count, bitorder="little").view(bool).nonzero()[0]
    elif form in _UNITS and size % (form - 1) == 0:
        unit, goes_on = _UNITS[form]
        units = content.view(unit)
        steps_K, done = units[:number].astype(np.int64), number
        far_F = (steps_K == goes_on).nonzero()[0]
        while 0 < len(far_F) <= len(units) - done:
            more_F = units[done : done + len(far_F)]
            steps_K[far_F] += more_F
            done += len(far_F)
            far_F = far_F[more_F == goes_on]
        if len(far_F) == 0 and done == len(units):
            at_K = np.cumsum(steps_K, out=steps_K)
    if len(at_K) != number or (number and at_K[-1] >= count):
        raise UpdateDamaged(
            f"a delta lists {number} places of {count} in form {form} and {size} bytes, which are "
            "not there; send it again"
        )
    return at_K, number, end


def _taken(data: Any, start: int, size: int) -> tuple[Any, int]:
    """Return `size` bytes of a delta from offset `start` on, and the offset after them.

    Raises:
        UpdateDamaged: the delta is shorter.
    """
    if start + size > len(data):
        raise UpdateDamaged(
            f"a delta of {len(data)} bytes has lists up to {start + size}; send it again"
        )
    return data[start : start + size], start + size
