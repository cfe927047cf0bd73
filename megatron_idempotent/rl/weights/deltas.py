"""Encodes what changed in a tensor between two versions, by bits, and writes it into the old one.

A delta is a run of bytes, little-endian, as it lies in a file or goes over a wire:

| bytes | content |
|---|---|
| 4 | `WDL1` |
| 1 | bytes of an element: 1, 2, 4 or 8 |
| 8, 8 | elements of the tensor, and how many of them changed |
| 8, 8 | `checksum()` of the tensor before and after |
| 8 | `checksum()` of the delta itself, with zeros here |
| | a list of places: the elements that changed, or all |
| | for each byte of an element, lowest first: a list of places, then one byte for each of them |

The last part is old XOR new, one byte of every changed element at a time; only bytes that are not 0
are there. So a delta that is written twice changes nothing, and its undo differs by the two
checksums alone. Optimizer steps mostly change a low byte, and the high ones cost next to nothing.

A list of places begins with a byte for its form and 8 bytes each for their number and for the
list's bytes. The forms: 0, every place; 1, a bitmap, lowest bit first; 2, 3 and 4, the gaps between
neighbours in units of 1, 2 and 4 bytes, where a unit of all ones says that the gap goes on after
it. The smallest is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .records import (
    WORDS,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    checksum,
    checksum_share,
    in_host_memory,
    word_blocks,
)

# Formats and not `struct.Struct`, which cannot be pickled with functions that travel by value.
_HEADER, _PLACES = "<4sBQQQQQ", "<BQQ"
_HEADER_BYTES, _PLACES_BYTES = struct.calcsize(_HEADER), struct.calcsize(_PLACES)
_MAGIC = b"WDL1"
CODEC = _MAGIC.decode()
"""The name of the encoding, for what lists deltas."""
_ALL, _BITMAP = 0, 1
_UNITS = {2: "<u1", 3: "<u2", 4: "<u4"}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EncodedDelta:
    """Holds a delta's bytes, which are checked when it is built.

    Example: `EncodedDelta(torch.frombuffer(content, dtype=torch.uint8))`.
    """

    data: torch.Tensor
    """uint8 [bytes], on the host."""

    def __post_init__(self) -> None:
        """Raise `UpdateDamaged` for bytes that are not those of a delta as it was encoded."""
        size = self.data.numel()
        if size < _HEADER_BYTES or bytes(self._bytes[:4]) != _MAGIC:
            raise UpdateDamaged(
                f"{size} bytes are no delta: they do not begin with {_MAGIC!r} and a header; send "
                "it again"
            )
        found, sealed = _seal(self._bytes), self._header[6]
        if found != sealed:
            raise UpdateDamaged(
                f"a delta of {size} bytes has checksum {found:016x}, it was encoded with "
                f"{sealed:016x}: bytes are missing or differ; send it again"
            )

    @property
    def _bytes(self) -> Any:
        return self.data.numpy()

    @property
    def _header(self) -> tuple[Any, ...]:
        return struct.unpack_from(_HEADER, self._bytes)

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        return int(self._header[2])

    @property
    def changed(self) -> int:
        """The number of elements that changed."""
        return int(self._header[3])

    @property
    def before(self) -> int:
        """The checksum of the tensor that the delta is for."""
        return int(self._header[4])

    @property
    def after(self) -> int:
        """The checksum of the tensor that it makes."""
        return int(self._header[5])

    @property
    def nbytes(self) -> int:
        """The delta's size in bytes."""
        return self.data.numel()

    def undo(self) -> EncodedDelta:
        """Return the delta that makes the old tensor of the new one."""
        *kept, before, after, _ = self._header
        header = *kept, after, before
        return _sealed(header, self._bytes[_HEADER_BYTES:])

    def places(self) -> tuple[Any, Any]:
        """Return places, int64 [K] in order, and old XOR new there, [K]; all other elements kept.

        Errors: `UpdateDamaged` for a list of places that does not fit the tensor.
        """
        itemsize, elements = self._header[1:3]
        at_K, end = _read_places(self._bytes, _HEADER_BYTES, elements)
        xor_KB = np.zeros((len(at_K), itemsize), np.uint8)
        for byte in range(itemsize):
            nonzero, start = _read_places(self._bytes, end, len(at_K))
            end = start + len(nonzero)
            if end > self.nbytes:
                raise _misfit(end, self.nbytes)
            xor_KB[nonzero, byte] = self._bytes[start:end]
        return at_K, xor_KB.reshape(-1).view(f"<u{itemsize}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """Holds a delta that was found to fit a tensor, to be written into it. `verify` makes it."""

    tensor: torch.Tensor
    at_K: Any
    xor_K: Any

    def write(self) -> None:
        """Change the tensor in place. Once more: undo."""
        flat, itemsize = self.tensor.detach().reshape(-1), self.xor_K.itemsize
        if in_host_memory(flat):
            flat.view(torch.uint8).numpy().view(f"u{itemsize}")[self.at_K] ^= self.xor_K
            return
        at_K = torch.from_numpy(self.at_K).to(flat.device)
        xor_K = torch.from_numpy(self.xor_K.view(np.uint8)).to(flat.device).view(_SIGNED[itemsize])
        bits = flat.view(_SIGNED[itemsize])
        bits[at_K] = bits[at_K] ^ xor_K


class Part(NamedTuple):
    """Places a range along one dimension. Example: `Part((8, 6), dim=1, start=2, size=4)`."""

    shape: tuple[int, ...]
    dim: int
    start: int
    size: int

    def of(self, at_K: Any) -> Any:
        """Return the places in the flat tensor of places in the flat part, int64 [K]."""
        inner = math.prod(self.shape[self.dim + 1 :])
        if math.prod(self.shape[: self.dim]) == 1:
            return at_K + self.start * inner
        lead, rest = at_K // (self.size * inner), at_K % (self.size * inner)
        return lead * (self.shape[self.dim] * inner) + self.start * inner + rest

    def has_whole_words(self, itemsize: int) -> bool:
        """Return whether every word of 8 bytes of the tensor lies in this part or outside of it."""
        if self.size == self.shape[self.dim]:
            return True
        inner = math.prod(self.shape[self.dim + 1 :]) * itemsize
        sizes = self.start * inner, self.size * inner, self.shape[self.dim] * inner
        return all(size % 8 == 0 for size in sizes)


def encode(
    new: torch.Tensor, old: torch.Tensor, *, before: int | None = None, part: Part | None = None
) -> EncodedDelta:
    """Return what changed from `old` to `new`, by bits.

    Args:
        new: any shape and device, of a type with 1, 2, 4 or 8 bytes.
        old: the same shape, type and device.
        before: `checksum(old)`, if it is known.
        part: the place of `new` and `old` in a tensor, in whole words; the delta is the tensor's
            then, and `before`, which is needed, is its checksum. `merged` joins those of all parts.

    Errors: `ValueError` for tensors that differ in shape, type or device.
    """
    told = [(tuple(each.shape), each.dtype, each.device) for each in (new, old)]
    if told[0] != told[1] or new.dtype.itemsize not in _SIGNED:
        raise ValueError(
            f"encode() got {told[0]} and {told[1]}; give two tensors of one shape, type and "
            f"device, with {', '.join(map(str, _SIGNED))} bytes an element"
        )
    before = after = checksum(old) if before is None else before
    elements = new.numel() if part is None else math.prod(part.shape)
    nbytes = elements * new.dtype.itemsize
    each = 8 // new.dtype.itemsize
    shift = each.bit_length() - 1
    places: list[Any] = [np.empty(0, np.int64)]
    xors: list[Any] = [np.empty(0, f"u{new.dtype.itemsize}")]
    for (start, new_W), (_, old_W) in zip(word_blocks(new), word_blocks(old), strict=True):
        at_W = _nonzero(new_W != old_W)
        if not len(at_W):
            continue
        is_W, was_W = _taken(new_W, at_W), _taken(old_W, at_W)
        whole_W = at_W + start if part is None else part.of((at_W + start) * each) // each
        after += _moved(is_W, was_W, whole_W, nbytes)
        xor_E = (is_W ^ was_W).view(xors[0].dtype)
        found_K = (xor_E != 0).nonzero()[0]  # of bools: ten times as fast
        places.append(((at_W[found_K >> shift] + start) << shift) + (found_K & (each - 1)))
        xors.append(xor_E[found_K])
    at_K, xor_K = np.concatenate(places), np.concatenate(xors)
    if part is not None:
        at_K = part.of(at_K)
    return pack(at_K, xor_K, elements, before, after % 2**64)


def _moved(is_W: Any, was_W: Any, at_W: Any, nbytes: int) -> int:
    """Return how far words, at their places in a tensor, move its checksum."""
    moved = low = 0
    for block in range(at_W[0] // WORDS, at_W[-1] // WORDS + 1):
        high = int(np.searchsorted(at_W, (block + 1) * WORDS))
        # The last word, if it is shorter, is a block by itself.
        short = int(high > low and at_W[high - 1] == nbytes // 8)
        for begin, end in ((low, high - short), (high - short, high)):
            if end > begin:
                start = at_W[end - 1] if begin == high - short else block * WORDS
                places = at_W[begin:end] - start
                moved += checksum_share(is_W[begin:end], start, nbytes, places)
                moved -= checksum_share(was_W[begin:end], start, nbytes, places)
        low = high
    return moved


def merged(deltas: Sequence[EncodedDelta], *, before: int) -> EncodedDelta:
    """Return one delta of a tensor with that checksum, of those of its parts, made with before=0.

    Errors: `ValueError` without any.
    """
    if not deltas:
        raise ValueError("merged() got no deltas; give at least one")
    header = deltas[0]._header
    after = (before + sum(each.after for each in deltas)) % 2**64
    if len(deltas) == 1:
        return _sealed((*header[:4], before, after), deltas[0]._bytes[_HEADER_BYTES:])
    return pack(*_united(deltas), header[2], before, after)


def pack(at_K: Any, xor_K: Any, elements: int, before: int, after: int) -> EncodedDelta:
    """Return the delta of the elements at these places, which are in order and all different.

    Args:
        at_K: int64 [K], places in the flat tensor.
        xor_K: old XOR new, unsigned [K], as wide as an element.
        elements: the number of elements of the tensor.
        before: the tensor's checksum.
        after: the checksum of the tensor that the delta makes.
    """
    itemsize = xor_K.itemsize
    parts = [_places(at_K, elements), *_planes(xor_K)]
    if len(at_K) * 2 > elements > len(at_K):  # to send all may be less than to say which
        xor_N = np.zeros(elements, xor_K.dtype)
        xor_N[at_K] = xor_K
        whole = [_places(np.arange(elements), elements), *_planes(xor_N)]
        parts = min(parts, whole, key=lambda each: sum(map(len, each)))
    return _sealed(
        (_MAGIC, itemsize, elements, np.count_nonzero(xor_K), before, after), np.concatenate(parts)
    )


def verify(encoded: EncodedDelta, tensor: torch.Tensor) -> Patch:
    """Return the delta as it is to be written into a tensor; nothing is written yet.

    The tensor as it is, and as it will be, is held to the delta's checksums. If it is as it will be
    already, there is nothing to write.

    Errors: `UpdateMismatch` for a tensor of another size, or one that is not contiguous;
        `UpdateRefused` for one with other bits than the delta was made for; `UpdateDamaged` for a
        delta that makes other bits than those that were sent.
    """
    at_K, xor_K = _fitting(encoded, tensor)
    before = checksum(tensor)
    if before == encoded.after:
        return Patch(tensor, at_K[:0], xor_K[:0])
    if before != encoded.before:
        raise UpdateRefused(
            f"a delta for a tensor with checksum {encoded.before:016x} came to one with "
            f"{before:016x}: an update was lost, or is another run's; send every tensor"
        )
    nbytes, low = tensor.nbytes, 0
    after, each = before, 8 // xor_K.itemsize
    block_E = np.zeros(0, xor_K.dtype)
    for start, was_W in word_blocks(tensor):
        high = int(np.searchsorted(at_K, (start + len(was_W)) * each))
        if high > low:
            # The block's words that change, each once, and their XOR.
            inside_K = at_K[low:high] - start * each
            if len(block_E) < len(was_W) * each:
                block_E = np.zeros(len(was_W) * each, xor_K.dtype)
            block_E[inside_K] = xor_K[low:high]
            words_K = inside_K >> (each.bit_length() - 1)
            at_W = words_K[np.flatnonzero(np.diff(words_K, prepend=-1))]
            old_W = _taken(was_W, at_W)
            new_W = old_W ^ block_E.view(np.uint64)[at_W]
            block_E[inside_K] = 0
            after += checksum_share(new_W, start, nbytes, at_W)
            after -= checksum_share(old_W, start, nbytes, at_W)
        low = high
    after %= 2**64
    if after != encoded.after:
        raise UpdateDamaged(
            f"a delta makes a tensor with checksum {after:016x}, and it was made of one with "
            f"{encoded.after:016x}; send the tensor whole"
        )
    return Patch(tensor, at_K, xor_K)


def apply(encoded: EncodedDelta, tensor: torch.Tensor) -> None:
    """Make the new tensor of the old one, in place; write nothing unless all is right.

    Once more: no-op. Errors: those of `verify`.
    """
    verify(encoded, tensor).write()


def join(deltas: Sequence[EncodedDelta]) -> EncodedDelta:
    """Return the delta of several, each for the tensor that the one before it makes.

    Errors: `UpdateDamaged` if one is for another tensor.
    """
    for one, other in itertools.pairwise(deltas):
        if (one.after, one.elements) != (other.before, other.elements):
            raise UpdateDamaged(
                f"a delta for a tensor with checksum {other.before:016x} follows one that makes "
                f"{one.after:016x}: an update is missing between them; send every tensor"
            )
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    return pack(*_united(deltas), first.elements, first.before, last.after)


def _united(deltas: Sequence[EncodedDelta]) -> tuple[Any, Any]:
    """Return the places, in order, that all deltas together change, and the XOR of all there."""
    at_K, xor_K = map(np.concatenate, zip(*(each.places() for each in deltas), strict=True))
    order_K = np.argsort(at_K, kind="stable")
    at_K, xor_K = at_K[order_K], xor_K[order_K]
    starts_U = np.flatnonzero(np.diff(at_K, prepend=-1))
    # A sum of no parts is no sum: reduceat() takes at least one.
    xor_U = np.bitwise_xor.reduceat(xor_K, starts_U) if len(starts_U) else xor_K
    kept = xor_U != 0
    return at_K[starts_U][kept], xor_U[kept]


def _fitting(encoded: EncodedDelta, tensor: torch.Tensor) -> tuple[Any, Any]:
    itemsize = encoded._header[1]
    if (tensor.numel(), tensor.dtype.itemsize) != (encoded.elements, itemsize):
        raise UpdateMismatch(
            f"a delta of {encoded.elements} elements of {itemsize} bytes came for a tensor of "
            f"{tensor.numel()} elements of {tensor.dtype.itemsize} bytes; send every tensor"
        )
    if not tensor.is_contiguous():
        raise UpdateMismatch(
            f"a delta came for a tensor with strides {tensor.stride()}, which is written in "
            "place; give one that is contiguous"
        )
    return encoded.places()


def _nonzero(mask_W: Any) -> Any:
    if isinstance(mask_W, torch.Tensor):
        return torch.nonzero(mask_W).flatten().cpu().numpy()
    return mask_W.nonzero()[0]


def _taken(words_W: Any, at_W: Any) -> Any:
    if isinstance(words_W, torch.Tensor):
        found = words_W[torch.from_numpy(at_W).to(words_W.device)]
        return found.cpu().numpy().view(np.uint64)
    return words_W[at_W]


def _planes(xor_K: Any) -> list[Any]:
    planes = xor_K.view(np.uint8).reshape(-1, xor_K.itemsize)
    parts = []
    for byte in range(xor_K.itemsize):
        plane = planes[:, byte]
        nonzero: Any = np.flatnonzero(plane != 0)
        places = _places(nonzero, len(plane))
        if len(places) + len(nonzero) >= len(plane) + _PLACES_BYTES:
            places, nonzero = _places(np.arange(len(plane)), len(plane)), slice(None)
        parts += [places, plane[nonzero]]
    return parts


def _places(at_K: Any, count: int) -> Any:
    """Return a list of places among `count` in its smallest form, uint8 [bytes]."""
    if len(at_K) == count:
        return _listed(_ALL, at_K, b"")
    gaps = np.diff(at_K, prepend=-1) - 1
    sizes = {_BITMAP: -(-count // 8)}
    for form, unit in _UNITS.items():
        goes_on = np.iinfo(unit).max
        units = len(gaps) + int((gaps[gaps >= goes_on] // goes_on).sum())
        sizes[form] = units * np.dtype(unit).itemsize
    form = min(sizes, key=lambda each: sizes[each])
    if form == _BITMAP:
        bits = np.zeros(count, bool)
        bits[at_K] = True
        return _listed(form, at_K, np.packbits(bits, bitorder="little"))
    unit = _UNITS[form]
    goes_on = np.iinfo(unit).max
    filled = np.full(sizes[form] // np.dtype(unit).itemsize, goes_on, unit)
    longer = np.flatnonzero(gaps >= goes_on)
    steps = np.ones(len(gaps), np.int64)
    steps[longer] += gaps[longer] // goes_on
    gaps[longer] %= goes_on
    filled[np.cumsum(steps) - 1] = gaps
    return _listed(form, at_K, filled)


def _listed(form: int, at_K: Any, content: Any) -> Any:
    content = np.frombuffer(memoryview(content).cast("B"), np.uint8)
    head = struct.pack(_PLACES, form, len(at_K), len(content))
    return np.concatenate([np.frombuffer(head, np.uint8), content])


def _read_places(data: Any, start: int, count: int) -> tuple[Any, int]:
    """Return the list of places among `count` that begins at a byte, and the byte after it."""
    if start + _PLACES_BYTES > len(data):
        raise _misfit(start + _PLACES_BYTES, len(data))
    form, changed, size = struct.unpack_from(_PLACES, data, start)
    start += _PLACES_BYTES
    content = data[start : start + size]
    if len(content) != size or changed > count:
        raise _misfit(start + size, len(data))
    if form == _ALL and changed == count:
        at_K = np.arange(count)
    elif form == _BITMAP and size == -(-count // 8):
        at_K = np.flatnonzero(np.unpackbits(content, count=count, bitorder="little"))
    elif form in _UNITS and size % np.dtype(_UNITS[form]).itemsize == 0:
        units = np.frombuffer(content.tobytes(), _UNITS[form])
        ends = units != np.iinfo(_UNITS[form]).max
        at_K = np.cumsum(units, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))
    else:
        raise UpdateDamaged(f"a delta lists places in form {form} and {size} bytes; send it again")
    if len(at_K) != changed or (changed and at_K[-1] >= count):
        raise UpdateDamaged(
            f"a delta lists {len(at_K)} places for {changed}, the last is to be below {count}; "
            "send it again"
        )
    return at_K, start + size


def _misfit(wanted: int, size: int) -> UpdateDamaged:
    return UpdateDamaged(f"a delta of {size} bytes has lists up to {wanted}; send it again")


def _sealed(header: tuple[Any, ...], content: Any) -> EncodedDelta:
    head = np.frombuffer(struct.pack(_HEADER, *header, 0), np.uint8)
    data = np.concatenate([head, content])
    data[_HEADER_BYTES - 8 : _HEADER_BYTES] = np.frombuffer(
        struct.pack("<Q", _seal(data)), np.uint8
    )
    return EncodedDelta(torch.from_numpy(data))


def _seal(data: Any) -> int:
    content = torch.from_numpy(data).clone()
    content[_HEADER_BYTES - 8 : _HEADER_BYTES] = 0
    return checksum(content)
