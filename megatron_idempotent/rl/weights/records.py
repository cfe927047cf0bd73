"""Defines records, checksums and errors of weights on their way from a trainer to an engine."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import reprlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


DELTA = ":delta"
"""The end of the name under which a tensor's delta is sent, as uint8 [bytes]."""

DELTA_HEADER = "<4sBQQQQ"
"""The beginning of a delta: a magic word, bytes of an element, elements of the tensor, elements
that changed, and the tensor's checksum before and after."""


class WeightsError(ValueError):
    """Weights cannot be taken as they are."""


class UpdateMismatch(WeightsError):
    """Tensors do not fit the model by name, shape or type; the message lists all of them."""


class UpdateDamaged(WeightsError):
    """Bytes are not those that were sent: a checksum differs, or a bucket is incomplete."""


class UpdateRefused(WeightsError):
    """An update does not come in turn: it is late, built on another version, or beside another."""


_LISTED = 20
#: NumPy's most dimensions.
_DIMS = 32


def field(fields: Any, key: str, kind: type | tuple[type, ...], where: str, remedy: str) -> Any:
    """Return what a JSON object has under a key; a number is no bool, and from 0 to 2**63 - 1.

    Errors: `UpdateDamaged` for an object that is none, lacks the key, or has something else there.
    """
    fact = "is not an object"
    if isinstance(fields, Mapping):
        fact = f"lacks {key!r}"
        if key in fields:
            value: Any = fields[key]
            number = isinstance(value, (int, float))
            in_range = not number or (not isinstance(value, bool) and 0 <= value < 2**63)
            if isinstance(value, kind) and in_range:
                return value
            fact = f"has {reprlib.repr(value)} as {key!r}"
    raise UpdateDamaged(f"{where} {fact}; {remedy}")


def listed(texts: Sequence[str], separator: str = "; ") -> str:
    """Join texts into one line: the first twenty, and how many more there are."""
    more = len(texts) - _LISTED
    return separator.join([*texts[:_LISTED], *([f"and {more} more"] if more > 0 else [])])


#: Words of 8 bytes in a block: half a MB, so that the passes stay in a processor's cache.
WORDS = 1 << 16
#: Blocks that a device mixes at once. It is asked for each, and waited for.
_ON_DEVICE = 32


class Part(NamedTuple):
    """Places a range along one dimension. Example: `Part((8, 6), dim=1, start=2, size=4)`."""

    shape: tuple[int, ...]
    dim: int
    start: int
    size: int

    def of(self, at_K: Any) -> Any:
        """Return the places in the flat tensor of places in the flat part, int64 [K]."""
        inner = math.prod(self.shape[self.dim + 1 :])
        if self.consecutive:
            return at_K + self.start * inner
        lead, rest = at_K // (self.size * inner), at_K % (self.size * inner)
        return lead * (self.shape[self.dim] * inner) + self.start * inner + rest

    @property
    def consecutive(self) -> bool:
        """True if its elements follow each other in the tensor."""
        return math.prod(self.shape[: self.dim]) == 1

    def has_whole_words(self, itemsize: int) -> bool:
        """Return whether every word of 8 bytes of the tensor lies in this part or outside of it."""
        if self.size == self.shape[self.dim]:
            return True
        inner = math.prod(self.shape[self.dim + 1 :]) * itemsize
        sizes = self.start * inner, self.size * inner, self.shape[self.dim] * inner
        return all(size % 8 == 0 for size in sizes)

    def words_share(self, start: int, words_W: Any, itemsize: int) -> int:
        """Return what words of the part, from that one on, add to the tensor's checksum."""
        import numpy as np
        import torch

        each = 8 // itemsize
        if self.consecutive:
            return words_share(start + self.of(0) // each, words_W)
        ends = start, start + len(words_W)
        at_W: Any = np.arange(*ends)
        if isinstance(words_W, torch.Tensor):
            at_W = torch.arange(*ends, device=words_W.device)
        return words_share(0, words_W, self.of(at_W * each) // each)


def checksum(tensor: torch.Tensor) -> int:
    """Return 64 bits, from 0 to 2**64 - 1, that tell two tensors' bytes apart, on any device.

    It is a sum over words of 8 bytes, each times an odd number for its place, in integer
    arithmetic: the same on every device and in every order. A change of one word always changes it,
    other changes all but always. Shape and type do not count; compare them, too. It guards against
    transmission errors and mix-ups, not against an adversary.

    Args:
        tensor: any shape and type. One that is not contiguous is copied first.
    """
    nbytes = tensor.numel() * tensor.dtype.itemsize
    return (nbytes + sum(words_share(*each) for each in word_blocks(tensor))) % 2**64


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether NumPy may have a tensor; no where a CPU rank's stands for a device's."""
    return tensor.is_cpu and not tensor.is_cuda


def word_blocks(tensor: torch.Tensor) -> Iterator[tuple[int, Any]]:
    """Yield a tensor's words of 8 bytes in blocks, after the number of each block's first.

    Blocks have half a MB, or 32 times as much on a device. Words on the host are NumPy's uint64
    [W], others torch's int64 [W]. If the last word has fewer bytes, it comes by itself, on the
    host, with zeros after them.
    """
    import numpy as np  # here: who sends no tensor needs neither
    import torch

    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole, size = bytes_N.numel() // 8, WORDS
    words_W: Any
    if in_host_memory(bytes_N):
        words_W = bytes_N[: whole * 8].numpy().view(np.uint64)
    else:
        if bytes_N.storage_offset() % 8:
            bytes_N = bytes_N.clone()  # a view in words must start at one
        words_W, size = bytes_N[: whole * 8].view(torch.int64), WORDS * _ON_DEVICE
    for start in range(0, whole, size):
        yield start, words_W[start : start + size]
    if whole * 8 < bytes_N.numel():
        rest = bytes_N[whole * 8 :].cpu().numpy().tobytes().ljust(8, b"\0")
        yield whole, np.frombuffer(rest, np.uint64)


def words_share(start: int, words_W: Any, at_W: Any = None) -> int:
    """Return what some words add to a tensor's checksum.

    Args:
        start: the number of the first word.
        words_W: the words, of a block that `word_blocks` gave.
        at_W: the words' places in the tensor, int64 [W] in order and where the words are; None for
            all from the first.
    """
    import torch

    device = words_W.device if isinstance(words_W, torch.Tensor) else None
    places_W = _odds(-WORDS, WORDS, device)  # below the numbers of blocks
    # Or two changes of the highest bits would cancel: an odd number times 2**63 is 2**63.
    mixed_W = words_W >> 32
    if device is not None:
        mixed_W &= 2**32 - 1  # torch's shift repeats the sign
    mixed_W ^= words_W
    if at_W is not None:
        mixed_W *= places_W[at_W & WORDS - 1]
        mixed_W *= _factors(int(at_W[-1]) // WORDS, device)[at_W >> WORDS.bit_length() - 1]
        return int(mixed_W.sum())
    share = done = 0
    while left := len(mixed_W) - done:  # a part begins where no block does
        block, first = divmod(start + done, WORDS)
        size = left // WORDS * WORDS if first == 0 and left > WORDS else min(left, WORDS - first)
        mixed_BW = mixed_W[done : done + size].reshape(-1, min(size, WORDS))
        mixed_BW *= places_W[first:][: mixed_BW.shape[1]]
        sums = mixed_BW.sum(1).tolist()
        factors = _factors(block + len(sums) - 1)[block:][: len(sums)].tolist()
        share += sum(map(operator.mul, sums, factors))
        done += size
    return share


def _odd(numbers_N: Any) -> Any:
    """Return an odd number of 64 bits for each: SplitMix64's (Steele, Lea and Flood 2014)."""
    import numpy as np

    mixed_N = numbers_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed_N ^= mixed_N >> np.uint64(shift)
        mixed_N *= np.uint64(factor)
    return mixed_N ^ mixed_N >> np.uint64(31) | np.uint64(1)


def _factors(last: int, device: torch.device | None = None) -> Any:
    """Return the factors of blocks up to that one, and of some more."""
    return _odds(0, 1 << last.bit_length(), device)


@functools.cache
def _odds(first: int, count: int, device: torch.device | None) -> Any:
    """Return `_odd` of so many numbers, as NumPy's or on a device."""
    import numpy as np
    import torch

    found_N = _odd(np.arange(first, first + count))
    return found_N if device is None else torch.from_numpy(found_N.view(np.int64)).to(device)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Describes one tensor by its Hugging Face name.

    Example: `TensorInfo(name="lm_head.weight", shape=(32000, 64), dtype=torch.bfloat16)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    def describe(self) -> str:
        """Return type and shape in words, for errors: `bfloat16 [32000, 64]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def as_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"name": self.name, "shape": list(self.shape), "dtype": dtype}

    @classmethod
    def from_json(
        cls, fields: Any, where: str = "a record", remedy: str = "pass on what as_json() gave"
    ) -> TensorInfo:
        """Return the tensor that `as_json` described; errors begin and end with the texts.

        Errors: `UpdateDamaged` for what is absent or malformed, and for a type torch lacks.
        """
        import torch

        name = field(fields, "name", str, where, remedy)
        where, found = f"{where}, {name},", field(fields, "dtype", str, where, remedy)
        dtype = getattr(torch, found, None)
        # Of quantised types and parts of bytes torch makes no tensor.
        if not isinstance(dtype, torch.dtype) or re.fullmatch("q.*|bit|u?int[1-7]", found):
            raise UpdateDamaged(
                f"{where} has dtype {found!r}, of which torch {torch.__version__} makes no tensor: "
                "install the sender's release"
            )
        sizes = field(fields, "shape", list, where, remedy)
        for size in sizes:
            field({"size": size}, "size", int, where, remedy)
        if len(sizes) > _DIMS or math.prod(filter(None, sizes)) * dtype.itemsize >= 2**63:
            raise UpdateDamaged(f"{where} has the shape {reprlib.repr(sizes)}; {remedy}")
        return cls(name=name, shape=tuple(sizes), dtype=dtype)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Return the record of a tensor."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def refuse_misfits(
    update_id: str, came: Iterable[TensorInfo], expected: Mapping[str, TensorInfo]
) -> None:
    """Raise `UpdateMismatch` unless tensors are the model's, and deltas no longer than they get.

    Args:
        update_id: the update's id, for the error.
        came: the tensors and deltas of an update.
        expected: every tensor of the model by name, as the update is to bring it.
    """
    wrong = []
    for given in came:
        name = given.name.removesuffix(DELTA)
        info = expected.get(name)
        if info is None:
            wrong.append(f"{name}: the model has no such tensor")
        elif given.name != name:
            # Each byte of a difference, its sign, and two bits for its place; then headers.
            if given.nbytes > (most := 2 * info.nbytes + 1024):
                wrong.append(f"{name}: a delta of {given.nbytes} bytes, at most {most} are needed")
        elif (given.shape, given.dtype) != (info.shape, info.dtype):
            wrong.append(f"{name}: {given.describe()}, the model has {info.describe()}")
    if wrong:
        raise UpdateMismatch(
            f"update {update_id} does not fit the model: {listed(wrong)}; send the weights of the "
            "model that this engine serves"
        )


def check_kv_scales(kv_scales: Mapping[str, float]) -> None:
    """Raise `ValueError` unless these are scales of a key-value cache; it names those that are not.

    A scale is a number above 0, and its name ends in .k_scale, .v_scale or .q_scale.
    """
    wrong = [
        f"{name} is {value!r}"
        for name, value in kv_scales.items()
        if isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < float("inf")
    ]
    if wrong:
        raise ValueError(
            f"kv_scales are numbers above 0, and {'; '.join(wrong[:5])}; a tensor's is `.item()`"
        )
    suffixes = (".k_scale", ".v_scale", ".q_scale")
    unknown = [name for name in kv_scales if not name.endswith(suffixes)]
    if unknown or not kv_scales:
        raise ValueError(
            f"kv_scales has names {unknown[:5]} of {len(kv_scales)}; give at least one, each ends "
            f"in {', '.join(suffixes)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """Names one version of the weights, to be staged and committed under one id.

    Example: `WeightUpdate(id="run-7/12", version=12)`.
    """

    id: str
    version: int
    """The trainer's version of the weights. Engines refuse one that is not above their own."""
    base_version: int | None = None
    """The version from which engines take tensors that are not sent; None if all are sent."""
    kv_scales: Mapping[str, float] | None = dataclasses.field(default=None, hash=False)
    """Scales of a key-value cache in FP8, by name, such as `model.layers.0.self_attn.k_scale`: a
    cached key is key ÷ scale. They take effect with the weights. None leaves those in use."""

    def __post_init__(self) -> None:
        if self.kv_scales is not None:
            check_kv_scales(self.kv_scales)
        if not self.id:
            raise ValueError("WeightUpdate() got an empty id: engines tell updates apart by it")
        if self.version < 0:
            raise ValueError(f"WeightUpdate() got version={self.version}; allowed: 0 or more")
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError(
                f"WeightUpdate() got base_version={self.base_version} and version={self.version}; "
                "allowed: an older version to build on"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bucket:
    """Holds some tensors of an update, whole, in the model's order; nobody may change them.

    Example: `Bucket.of(0, {"model.norm.weight": tensor})`.
    """

    index: int
    """Counts the buckets of one update from 0."""
    tensors: Mapping[str, torch.Tensor]
    checksums: Mapping[str, int]
    """`checksum()` of each tensor by name, computed where the tensor was made."""

    @classmethod
    def of(cls, index: int, tensors: Mapping[str, torch.Tensor]) -> Bucket:
        """Return a bucket with the checksums of its tensors."""
        return cls(
            index=index,
            tensors=dict(tensors),
            checksums={name: checksum(tensor) for name, tensor in tensors.items()},
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def elements_changed(self) -> int:
        """The number of elements that the bucket brings, in tensors and in deltas."""
        return sum(changed_elements(name, tensor) for name, tensor in self.tensors.items())


def changed_elements(name: str, tensor: torch.Tensor) -> int:
    """Return how many elements a sent tensor, or a delta, brings: all of a tensor."""
    if not name.endswith(DELTA):
        return tensor.numel()
    return int(struct.unpack_from(DELTA_HEADER, tensor.cpu().numpy())[3])


class WeightSource(Protocol):
    """Gives a trainer's weights under Hugging Face names. Every method is collective: all enter.

    `hf.MegatronWeights` and `hf.FSDPWeights` are two such sources.
    """

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return all tensors in the order in which they are sent; the same on all ranks.

        Moves no data.
        """

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the weights in buckets of up to `bucket_bytes`, at least one tensor each.

        Only rank 0 of the trainer gets tensors, unless the source has others send theirs, too; the
        others get as many buckets without any, and must take them all. A bucket is made when it is
        asked for. If the iterator has `close()`, as generators do, that ends an iteration half-way,
        and the other ranks' with it.
        """


class ChangesSource(WeightSource, Protocol):
    """Finds by itself what has changed, on the ranks that have it. `finds_changes` is True."""

    finds_changes: bool

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> Iterator[Bucket]:
        """Yield what has changed since the last iteration, or everything with `whole`.

        Rank 0's `whole` holds on all ranks. Tensors that have changed come as deltas, under their
        name and `DELTA`, or whole, and the others do not come.
        """


def end_export(buckets: Iterator[Bucket]) -> None:
    """End an iteration of `WeightSource.buckets` half-way, if its iterator has `close()`."""
    close = getattr(buckets, "close", None)
    if close is not None:
        close()
