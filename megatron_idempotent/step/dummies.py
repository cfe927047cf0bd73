"""Makes dummy microbatches like those of another rank, and tells batches apart by fingerprints.

A step whose ranks do not run in lockstep calls no function of this file.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from megatron_idempotent.fp8.packing import Pack
from megatron_idempotent.megatron.replica_check import checksum

from .microbatches import SAMPLE_MASK, SCALARS, TOKENS, flat

#: First item of the tuple by which `template` replaces a tensor or a pack. It is no class, because
#: plain pickle cannot import a class that itself arrived pickled by value.
_MARK = "megatron_idempotent"


def template(inputs: Any, name: str = "") -> Any:
    """Describe a microbatch's inputs: types and shapes, but no tensor's values.
    Another rank makes zeros like them from the description (`dummy`).

    Tensors at any depth of mappings, dataclasses, lists and tuples are replaced by a description
    without values; other objects are kept. The description of packs and of `cu_seqlens` has their
    borders, by which attention tells sequences apart. `name` is the name of a value in its
    microbatch.
    """
    if isinstance(inputs, Pack):
        return _MARK, "pack", inputs.lengths, inputs.segments
    if isinstance(inputs, Tensor) and name.startswith("cu_seqlens"):
        return _MARK, "borders", inputs.tolist(), inputs.dtype
    if isinstance(inputs, Tensor):
        lengths = [len(row) for row in inputs.unbind()] if inputs.is_nested else None
        return _MARK, "tensor", tuple(flat(inputs).shape), inputs.dtype, lengths
    if hasattr(inputs, "keys") and hasattr(inputs, "items"):  # a TensorDict is no Mapping
        return {name: template(value, str(name)) for name, value in inputs.items()}
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        return _with_fields(inputs, template)
    description: Any = _pytree.tree_map_only(Tensor, template, inputs)
    return description


def dummy(description: Any, device: Any) -> Any:
    """Make a microbatch of zeros from another rank's `template`; its sample mask is all zeros."""
    if _is_mark(description):
        return _zeros(description, device)
    if isinstance(description, Mapping):
        batch = {name: dummy(value, device) for name, value in description.items()}
        if isinstance(batch.get(TOKENS), Tensor) and SAMPLE_MASK not in batch:
            batch[SAMPLE_MASK] = torch.zeros(batch[TOKENS].shape[0], device=device)
        return batch
    if dataclasses.is_dataclass(description) and not isinstance(description, type):
        return _with_fields(description, lambda value, _: dummy(value, device))
    return _pytree.tree_map(
        lambda leaf: _zeros(leaf, device) if _is_mark(leaf) else leaf, description, is_leaf=_is_mark
    )


def _with_fields(record: Any, change: Any) -> Any:
    """Return a copy of a dataclass whose fields are `change(value, name)`."""
    changed = copy.copy(record)
    for field in dataclasses.fields(changed):
        object.__setattr__(changed, field.name, change(getattr(changed, field.name), field.name))
    return changed


def _is_mark(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_MARK,)


def _zeros(description: tuple[Any, ...], device: Any) -> Any:
    """Make what one description in a `template` describes: a tensor of zeros; or a `Pack` of
    sequences of the described lengths; or a `cu_seqlens` tensor with the described values.
    """
    match description:
        case _, "pack", lengths, segments:
            return Pack.laid_out(lengths, segments, device=device)
        case _, "borders", ends, dtype:
            return torch.tensor(ends, dtype=dtype, device=device)
    _, _, shape, dtype, lengths = description
    values = torch.zeros(shape, dtype=dtype, device=device)
    if lengths is None:
        return values
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, ends)


def fingerprint(batch: Any) -> dict[str, Any]:
    """Describe the items of a batch or list of microbatches, so that two batches can be compared.
    Return each item's path in the batch, such as `batch['input_ids']`, → its description.

    Items are the tensors, numbers, strings and Nones at any depth of the batch. A tensor's
    description is its shape, type and a checksum, which stays on the device, so that the host does
    not wait. Other objects are described by their type alone.
    """
    return dict(_leaves(batch, "batch"))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        if value.is_nested:
            jagged: Any = value
            yield f"{path}.offsets", _tensor_leaf(jagged.offsets())
        yield path, _tensor_leaf(flat(value))
    elif isinstance(value, SCALARS):
        yield path, repr(value)
    elif hasattr(value, "keys") and hasattr(value, "items"):
        for name, item in value.items():
            yield from _leaves(item, f"{path}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None), f"{path}.{field.name}")
    else:
        yield path, f"a {type(value).__name__}"


def _tensor_leaf(value: Tensor) -> tuple[Any, ...]:
    values = torch.view_as_real(value) if value.is_complex() else value
    return tuple(value.shape), value.dtype, checksum(values)


def describe_leaf(leaf: Any) -> str:
    """Return one value of a `fingerprint` as text, None as "not there". The host waits until the
    device has computed a checksum.
    """
    if leaf is None:
        return "not there"
    if isinstance(leaf, str):
        return leaf
    shape, dtype, sum_of_bits = leaf
    return f"{dtype} of {shape} with checksum {int(sum_of_bits) % 2**64:016x}"
