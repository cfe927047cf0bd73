"""Defines records, checksums and errors of weights in transit from a trainer to an engine."""

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
"""The suffix of the name under which a tensor's delta is sent, as uint8 [bytes]."""

DELTA_HEADER = "<4sBQQQQ"
"""The beginning of a delta: a magic word, bytes of an element, elements of the tensor, elements
that changed, and the tensor's checksum before and after."""


class WeightsError(ValueError):
    """The base class of errors for weights that cannot be used: they do not fit the model, are
    damaged, or come out of order.
    """


class UpdateMismatch(WeightsError):
    """Names, shapes or dtypes of an update's tensors differ from the model's; the message lists all
    of them.
    """


class UpdateDamaged(WeightsError):
    """An update's bytes or JSON differ from those that were sent, or parts of the update are
    missing.
    """


class UpdateRefused(WeightsError):
    """An engine does not accept an update, because the update is too old, builds on another version
    than the served one, or comes while another update is being staged.
    """


_LISTED = 20
#: The most dimensions of a NumPy array.
_DIMS = 32


def field(fields: Any, key: str, kind: type | tuple[type, ...], subject: str, remedy: str) -> Any:
    """Return the field `key` of a JSON object. Raise `UpdateDamaged` if the field is missing, or
    its value is not of the type `kind`.

    A number must not be a bool, and must be from 0 to 2**63 - 1.

    Args:
        fields: the parsed JSON.
        key: the field's name.
        kind: the allowed types.
        subject: the beginning of the error message, the object's name.
        remedy: the end of the error message.

    Raises:
        UpdateDamaged: `fields` is not an object, lacks the key, or has another type of value.
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
    raise UpdateDamaged(f"{subject} {fact}; {remedy}")


def listed(texts: Sequence[str], separator: str = "; ") -> str:
    """Join texts into one line: the first twenty texts, and the number of further texts."""
    more = len(texts) - _LISTED
    return separator.join([*texts[:_LISTED], *([f"and {more} more"] if more > 0 else [])])


#: Words of 8 bytes in a block: half a MB, so that all passes stay in a processor's cache.
WORDS = 1 << 16
#: Blocks per launch on a device, because the host waits for every launch.
_ON_DEVICE = 32


class Part(NamedTuple):
    """A range of a tensor along one dimension. Example: `Part((8, 6), dim=1, start=2, size=4)`."""

    shape: tuple[int, ...]
    dim: int
    start: int
    size: int

    def of(self, at_K: Any) -> Any:
        """Convert flat indices in the part to flat indices in the tensor, int64 [K]."""
        inner = math.prod(self.shape[self.dim + 1 :])
        if self.consecutive:
            return at_K + self.start * inner
        lead, offset = at_K // (self.size * inner), at_K % (self.size * inner)
        return lead * (self.shape[self.dim] * inner) + self.start * inner + offset

    @property
    def consecutive(self) -> bool:
        """True if the part's elements are contiguous in the flattened tensor."""
        return math.prod(self.shape[: self.dim]) == 1

    def has_whole_words(self, itemsize: int) -> bool:
        """Return True if the part's boundaries split none of the tensor's 8-byte words."""
        if self.size == self.shape[self.dim]:
            return True
        inner = math.prod(self.shape[self.dim + 1 :]) * itemsize
        sizes = self.start * inner, self.size * inner, self.shape[self.dim] * inner
        return all(size % 8 == 0 for size in sizes)

    def words_share(self, start: int, words_W: Any, itemsize: int) -> int:
        """Return the contribution of the part's 8-byte words `words_W`, which begin at word `start`
        of the part, to the checksum of the complete tensor.
        """
        import numpy as np
        import torch

        per_word = 8 // itemsize
        if self.consecutive:
            return words_share(start + self.of(0) // per_word, words_W)
        ends = start, start + len(words_W)
        at_W: Any = np.arange(*ends)
        if isinstance(words_W, torch.Tensor):
            at_W = torch.arange(*ends, device=words_W.device)
        return words_share(0, words_W, self.of(at_W * per_word) // per_word)


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes, from 0 to 2**64 - 1.

    It is a sum over mixed 8-byte words, each multiplied by an odd number that depends on its
    position, in integer arithmetic: the result is the same on every device and in every order. A
    change of one word always changes it, and other changes almost always. It does not cover shape
    and dtype. It detects transmission errors and mix-ups, not tampering.

    Args:
        tensor: any shape and dtype. A tensor that is not contiguous is copied first.
    """
    nbytes = tensor.numel() * tensor.dtype.itemsize
    return (nbytes + sum(words_share(*block) for block in word_blocks(tensor))) % 2**64


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Return True if NumPy can read a tensor's memory: it is on the CPU, and does not simulate a
    CUDA tensor.
    """
    return tensor.is_cpu and not tensor.is_cuda


def word_blocks(tensor: torch.Tensor) -> Iterator[tuple[int, Any]]:
    """Yield the 8-byte words of a tensor's bytes in blocks: for each block, the index of its first
    word, and the words. Zeros fill up the tensor's last word.

    Blocks have half a MB, or 32 times as much on a device. Words on the host are NumPy's uint64
    [W], on a device torch's int64 [W]. An incomplete last word is a block of its own, on the host
    and padded with zeros.
    """
    import numpy as np  # here, because an update without tensors needs neither NumPy nor torch
    import torch

    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words, size = bytes_N.numel() // 8, WORDS
    words_W: Any
    if in_host_memory(bytes_N):
        words_W = bytes_N[: words * 8].numpy().view(np.uint64)
    else:
        if bytes_N.storage_offset() % 8:
            bytes_N = bytes_N.clone()  # a view as words must be aligned
        words_W, size = bytes_N[: words * 8].view(torch.int64), WORDS * _ON_DEVICE
    for start in range(0, words, size):
        yield start, words_W[start : start + size]
    if words * 8 < bytes_N.numel():
        last_bytes = bytes_N[words * 8 :].cpu().numpy().tobytes().ljust(8, b"\0")
        yield words, np.frombuffer(last_bytes, np.uint64)


def words_share(start: int, words_W: Any, at_W: Any = None) -> int:
    """Return how much the 8-byte words `words_W` of a tensor contribute to the tensor's checksum.
    The words are consecutive from word `start` on or, with `at_W`, are the words with these
    indices.

    Args:
        start: the index of the first word.
        words_W: the words, from a block of `word_blocks`.
        at_W: the words' indices in the tensor, ascending int64 [W] on the words' device; None for
            consecutive ones.
    """
    import torch

    device = words_W.device if isinstance(words_W, torch.Tensor) else None
    # Factors of positions come from negative numbers, factors of blocks from positive ones, so that
    # they differ.
    places_W = _odds(-WORDS, WORDS, device)
    # Without mixing, changes of two words' highest bits would cancel in the sum: the product of
    # 2**63 and any odd number is 2**63.
    mixed_W = words_W >> 32
    if device is not None:
        mixed_W &= 2**32 - 1  # torch's shift of an int64 copies the sign bit
    mixed_W ^= words_W
    if at_W is not None:
        mixed_W *= places_W[at_W & WORDS - 1]
        mixed_W *= _factors(int(at_W[-1]) // WORDS, device)[at_W >> WORDS.bit_length() - 1]
        return int(mixed_W.sum())
    share = consumed = 0
    while remaining := len(mixed_W) - consumed:  # a part may begin within a block
        block, first = divmod(start + consumed, WORDS)
        size = (
            remaining // WORDS * WORDS
            if first == 0 and remaining > WORDS
            else min(remaining, WORDS - first)
        )
        mixed_BW = mixed_W[consumed : consumed + size].reshape(-1, min(size, WORDS))
        mixed_BW *= places_W[first:][: mixed_BW.shape[1]]
        sums = mixed_BW.sum(1).tolist()
        factors = _factors(block + len(sums) - 1)[block:][: len(sums)].tolist()
        share += sum(map(operator.mul, sums, factors))
        consumed += size
    return share


def _odd(numbers_N: Any) -> Any:
    """Map each number to a pseudo-random odd 64-bit number, by SplitMix64 (Steele, Lea and Flood
    2014).
    """
    import numpy as np

    mixed_N = numbers_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed_N ^= mixed_N >> np.uint64(shift)
        mixed_N *= np.uint64(factor)
    return mixed_N ^ mixed_N >> np.uint64(31) | np.uint64(1)


def _factors(last: int, device: torch.device | None = None) -> Any:
    """Return the odd numbers by which the checksum multiplies the sums of blocks: of blocks 0 to
    `last`, and of a few more, so that the count is a power of two.
    """
    return _odds(0, 1 << last.bit_length(), device)


@functools.cache
def _odds(first: int, count: int, device: torch.device | None) -> Any:
    """Return the pseudo-random odd numbers that `_odd` computes for the `count` integers from
    `first` on, as a NumPy array or a tensor on `device`; cached.
    """
    import numpy as np
    import torch

    found_N = _odd(np.arange(first, first + count))
    return found_N if device is None else torch.from_numpy(found_N.view(np.int64)).to(device)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """The name (as in Hugging Face), shape and dtype of a tensor, without its data.

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
        """Return dtype and shape as text, for errors: `bfloat16 [32000, 64]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def as_json(self) -> dict[str, Any]:
        """Return name, shape and dtype as a JSON object, which `from_json` reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"name": self.name, "shape": list(self.shape), "dtype": dtype}

    @classmethod
    def from_json(
        cls, fields: Any, subject: str = "a record", remedy: str = "pass on what as_json() gave"
    ) -> TensorInfo:
        """Make a `TensorInfo` from the JSON object that `as_json` returned, after checking each
        field.

        Error messages begin with `subject` and end with `remedy`.

        Raises:
            UpdateDamaged: a field is missing or malformed, or torch lacks the dtype.
        """
        import torch

        name = field(fields, "name", str, subject, remedy)
        subject, dtype_name = f"{subject}, {name},", field(fields, "dtype", str, subject, remedy)
        dtype = getattr(torch, dtype_name, None)
        # torch cannot allocate quantised dtypes and dtypes below a byte.
        if not isinstance(dtype, torch.dtype) or re.fullmatch("q.*|bit|u?int[1-7]", dtype_name):
            raise UpdateDamaged(
                f"{subject} has dtype {dtype_name!r}, of which torch {torch.__version__} makes no "
                "tensor: install the sender's release"
            )
        sizes = field(fields, "shape", list, subject, remedy)
        for size in sizes:
            field({"size": size}, "size", int, subject, remedy)
        if len(sizes) > _DIMS or math.prod(filter(None, sizes)) * dtype.itemsize >= 2**63:
            raise UpdateDamaged(f"{subject} has the shape {reprlib.repr(sizes)}; {remedy}")
        return cls(name=name, shape=tuple(sizes), dtype=dtype)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Return a `TensorInfo` with `name`, and the tensor's shape and dtype."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def refuse_misfits(
    update_id: str, came: Iterable[TensorInfo], expected: Mapping[str, TensorInfo]
) -> None:
    """Raise `UpdateMismatch` if an update has a tensor that the model does not have, or that
    differs in shape or dtype from the model's, or a delta that is larger than any delta of its
    tensor can be.

    Args:
        update_id: the update's id, for the error.
        came: the tensors and deltas of an update.
        expected: every tensor of a full update, by name.
    """
    wrong = []
    for received in came:
        name = received.name.removesuffix(DELTA)
        info = expected.get(name)
        if info is None:
            wrong.append(f"{name}: the model has no such tensor")
        elif received.name != name:
            # A delta needs at most the differences, signs, two bits per position, and headers.
            if received.nbytes > (most := 2 * info.nbytes + 1024):
                wrong.append(
                    f"{name}: a delta of {received.nbytes} bytes, at most {most} are needed"
                )
        elif (received.shape, received.dtype) != (info.shape, info.dtype):
            wrong.append(f"{name}: {received.describe()}, the model has {info.describe()}")
    if wrong:
        raise UpdateMismatch(
            f"update {update_id} does not fit the model: {listed(wrong)}; send the weights of the "
            "model that this engine serves"
        )


def check_kv_scales(kv_scales: Mapping[str, float]) -> None:
    """Raise `ValueError` if `kv_scales` is empty, a name does not end in `.k_scale`, `.v_scale` or
    `.q_scale`, or a value is not a finite number above 0.
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
    """Identifies an update of an engine's weights: its id, its version, and the version that it
    builds on.

    Example: `WeightUpdate(id="run-7/12", version=12)`.
    """

    id: str
    version: int
    """The trainer's version of the weights. Engines reject versions up to the served one."""
    base_version: int | None = None
    """The version that the update builds on, if it omits unchanged tensors; None if it is full."""
    kv_scales: Mapping[str, float] | None = dataclasses.field(default=None, hash=False)
    """Scales of a key-value cache in FP8, by name, such as `model.layers.0.self_attn.k_scale`: a
    cached key is key ÷ scale. They take effect with the weights. None keeps the current scales."""

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
    """Unsharded tensors and deltas of an update that are sent together, with the checksum of each;
    the tensors must not be changed.

    Example: `Bucket.of(0, {"model.norm.weight": tensor})`.
    """

    index: int
    """The index of the bucket in its update, from 0."""
    tensors: Mapping[str, torch.Tensor]
    checksums: Mapping[str, int]
    """`checksum()` of each tensor by name, computed on the rank that made the tensor."""

    @classmethod
    def of(cls, index: int, tensors: Mapping[str, torch.Tensor]) -> Bucket:
        """Make a bucket of the given tensors, and compute the checksum of each."""
        return cls(
            index=index,
            tensors=dict(tensors),
            checksums={name: checksum(tensor) for name, tensor in tensors.items()},
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors in the bucket."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def elements_changed(self) -> int:
        """The number of elements that the bucket transfers: all elements of its full tensors, and
        the changed elements of its deltas.
        """
        return sum(changed_elements(name, tensor) for name, tensor in self.tensors.items())


def changed_elements(name: str, tensor: torch.Tensor) -> int:
    """Return the number of elements that a bucket's tensor transfers: all of a full tensor, or the
    changed ones of a delta.
    """
    if not name.endswith(DELTA):
        return tensor.numel()
    return int(struct.unpack_from(DELTA_HEADER, tensor.cpu().numpy())[3])


class WeightSource(Protocol):
    """The protocol of an exporter of a trainer's weights under Hugging Face names. Every method is
    a collective of all ranks of the trainer.

    `hf.MegatronWeights` is such a source.
    """

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the name, shape and dtype of all tensors, in the order of sending; no data is
        moved. The result is the same on all ranks.
        """

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the complete weights, unsharded, in buckets of up to `bucket_bytes`; a larger
        tensor has a bucket of its own.

        The trainer's rank 0 gets tensors, and for some sources further sending ranks. All other
        ranks get the same number of buckets without tensors, and must take them all. A bucket is
        made by the call of `next`. If the iterator has `close()`, as generators do, that ends an
        incomplete iteration on all ranks.
        """


class ChangesSource(WeightSource, Protocol):
    """The protocol of a `WeightSource` whose ranks find the changed elements themselves, before
    weights are gathered. `finds_changes` is True.
    """

    finds_changes: bool

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> Iterator[Bucket]:
        """Yield, in buckets, the changes of the weights since the last export; with `whole`, yield
        all tensors in full.

        Rank 0's `whole` applies to all ranks. A changed tensor is a delta, named with the suffix
        `DELTA`, or complete; unchanged tensors are omitted.
        """


def end_export(buckets: Iterator[Bucket]) -> None:
    """Call `close()` of an iterator that `WeightSource.buckets` returned, to end the export early.
    If the iterator has no `close()`: no-op.
    """
    close = getattr(buckets, "close", None)
    if close is not None:
        close()
