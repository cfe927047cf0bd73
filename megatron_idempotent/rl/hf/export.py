"""Gives a Megatron model's weights under Hugging Face names, whole, on ranks that send them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_idempotent.fp8.blockwise import BLOCK, E4M3
from megatron_idempotent.fp8.export import Fp8Export
from megatron_idempotent.rl.weights.deltas import EncodedDelta, merged
from megatron_idempotent.rl.weights.last_sent import LastSent
from megatron_idempotent.rl.weights.records import (
    DELTA,
    Part,
    TensorInfo,
    checksum,
    listed,
)
from megatron_idempotent.window.params import finish_gathers

from .buckets import BucketStream, Fetch
from .config import Architecture, CheckpointMismatch, FailedElsewhere
from .load import placed_slots
from .names import Lora, Placed, SlotPart, hf_shapes


class TensorPart(NamedTuple):
    """Names a range of a tensor along `dim`, and the rank of the group that sends it."""

    dim: int
    start: int
    size: int
    rank: int

    def of(self, shape: tuple[int, ...]) -> Part:
        """Return its place in a tensor of that shape."""
        return Part(shape, self.dim, self.start, self.size)


class OwnedSlice(NamedTuple):
    """Pairs a part of a tensor that this rank has with the slot that it is in."""

    share: SlotPart
    placed: Placed

    def consecutive(self) -> torch.Tensor | None:
        """Return the part if it is consecutive in memory, else None."""
        (start, size), *others = self.share.segments
        rows = self.placed.view.narrow(self.share.dim, start, size)
        return rows if not others and rows.is_contiguous() else None

    def copy(self, into: torch.Tensor) -> None:
        at, dim, view = 0, self.share.dim, self.placed.view
        for start, size in self.share.segments:
            into.narrow(dim, at, size).copy_(view.narrow(dim, start, size))
            at += size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Lists all tensors in the order in which they are sent, and the parts of each."""

    infos: tuple[TensorInfo, ...]
    """The tensors, with the parameters' types."""
    parts: tuple[tuple[TensorPart, ...], ...]
    """The parts of each tensor, in order along their dimension."""
    held: Mapping[tuple[str, int, int, int], OwnedSlice]
    """The parts that this rank has, by name, dimension, start and size."""


def make_plan(
    shapes: Mapping[str, tuple[int, ...]],
    placed: Sequence[Placed] | None,
    error: BaseException | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Tell all ranks of the group what this one has, and return the plan that comes of it.

    All ranks of the group enter, if there is one.

    Args:
        shapes: the shapes of all tensors, in order.
        placed: this rank's slots; None if they could not be found.
        error: the reason why they could not; all ranks raise then.
        group: the ranks that have the model; None for the default group.

    Raises:
        FailedElsewhere: another rank brings an error.
        CheckpointMismatch: parts of tensors that no rank has, or types that differ.
    """
    held: dict[tuple[str, int, int, int], OwnedSlice] = {}
    for each in placed or ():
        for share in each.slot.shares():
            held.setdefault(share.place, OwnedSlice(share, each))
    mine = {place: each.placed.parameter.dtype for place, each in held.items()}
    told: list[Any] = [(mine, None if error is None else f"{type(error).__name__}: {error}")]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        own, told = told[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(told, own, group=group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]
    if failed:
        raise FailedElsewhere(f"there is nothing to export: {listed(failed)}")
    owners: dict[str, dict[tuple[int, int, int], tuple[int, torch.dtype]]] = {}
    wrong: list[str] = []
    for rank, (places, _) in enumerate(told):
        for (name, *place), dtype in places.items():
            dim, start, size = place
            _, there = owners.setdefault(name, {}).setdefault((dim, start, size), (rank, dtype))
            if there != dtype:
                wrong.append(f"{name} is {there} and {dtype} on rank {rank}")
    infos, parts = [], []
    for name, shape in shapes.items():
        found = owners.get(name, {})
        ordered = tuple(TensorPart(*place, rank) for place, (rank, _) in sorted(found.items()))
        if not _covers(ordered, shape):
            spans = [f"{start} to {start + size}" for _, start, size, _ in ordered]
            wrong.append(f"of {name} {list(shape)} there is {', '.join(spans) or 'nothing'}")
            continue
        dtypes = {dtype for _, dtype in found.values()}
        if len(dtypes) > 1:
            wrong.append(f"{name} is of several types, {sorted(map(str, dtypes))}")
        infos.append(TensorInfo(name=name, shape=shape, dtype=dtypes.pop()))
        parts.append(ordered)
    if wrong:
        raise CheckpointMismatch(
            f"the ranks' chunks do not make up the model: {listed(wrong)}; pass all chunks of "
            "every rank"
        )
    return Plan(infos=tuple(infos), parts=tuple(parts), held=held)


def _covers(parts: Sequence[TensorPart], shape: Sequence[int]) -> bool:
    """Return whether parts follow each other along one dimension, from its start to its end."""
    at = 0
    for part in parts:
        if part.dim != parts[0].dim or part.start != at:
            return False
        at += part.size
    return bool(parts) and at == shape[parts[0].dim]


class Shipping:
    """Fetches tensors of a plan, as `BucketStream` asks for them.

    Rows go straight from a parameter into their tensor. Parts whose bytes are not consecutive, or
    that have another type, are packed first: at a time never more bytes than the largest part that
    a rank sends, or the largest tensor that it keeps.
    """

    def __init__(
        self,
        plan: Plan,
        infos: tuple[TensorInfo, ...],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        senders: int | None = 1,
    ) -> None:
        """
        Args:
            plan: the result of `make_plan`.
            infos: the tensors as they are to arrive.
            device: the device on which ranks want the tensors that they keep.
            group: the plan's group; None for the default group.
            senders: as for `MegatronWeights`.
        """
        self._plan, self._infos, self._device, self._group = plan, infos, device, group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.keepers = _keepers(plan, senders)
        """The rank at which each tensor arrives."""
        packed = [
            info.nbytes for info, at in zip(infos, self.keepers, strict=True) if self.rank == at
        ]
        for info, parts in zip(infos, plan.parts, strict=True):
            packed += [
                info.nbytes // info.shape[part.dim] * part.size
                for part in parts
                if part.rank == self.rank
            ]
        self._packing = max(packed, default=0)

    def __call__(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Return the tensors that this rank keeps, whole."""
        tensors: dict[str, torch.Tensor] = {}
        flight = _Flight(self._packing, self._group)
        for member in members:
            info, keeper = self._infos[member], self.keepers[member]
            if keeper == self.rank:
                whole = torch.empty(info.shape, dtype=info.dtype, device=self._device)
                tensors[info.name] = whole
            for part in self._plan.parts[member]:
                if keeper == self.rank:
                    self._receive(info, part, flight, tensors[info.name])
                elif part.rank == self.rank:
                    self._send(info, part, flight, keeper)
        flight.land()
        return tensors

    def mine(self, member: int) -> Iterator[tuple[TensorPart, torch.Tensor]]:
        """Yield this rank's parts of a tensor, in the type that is sent; each may be a view."""
        info = self._infos[member]
        for part in self._plan.parts[member]:
            if part.rank == self.rank:
                held = self._held(info, part)
                rows = held.consecutive()
                if rows is None or rows.dtype != info.dtype:
                    shape = list(info.shape)
                    shape[part.dim] = part.size
                    rows = held.placed.parameter.new_empty(shape, dtype=info.dtype)
                    held.copy(rows)
                yield part, rows

    def _send(self, info: TensorInfo, part: TensorPart, flight: _Flight, keeper: int) -> None:
        held = self._held(info, part)
        rows = held.consecutive()
        if rows is None or rows.dtype != info.dtype:
            rows = flight.room(info, part, held.placed.parameter.device)
            held.copy(rows)
        flight.add(dist.isend, rows, keeper)

    def _receive(
        self, info: TensorInfo, part: TensorPart, flight: _Flight, whole: torch.Tensor
    ) -> None:
        rows = whole.narrow(part.dim, part.start, part.size)
        if part.rank == self.rank:
            self._held(info, part).copy(rows)
        elif rows.is_contiguous():
            flight.add(dist.irecv, rows, part.rank)
        else:
            flight.add(dist.irecv, flight.room(info, part, self._device), part.rank, into=rows)

    def bring(
        self,
        parts: Sequence[tuple[int, TensorPart]],
        found: Mapping[tuple[int, TensorPart], EncodedDelta],
    ) -> Sequence[tuple[int, EncodedDelta | None]]:
        """Bring `after` and the parts' deltas to their keepers, in order; None if nothing changed.

        All ranks enter, with the same parts, and get `after` of all; deltas are None elsewhere.
        """
        sent = [
            found[each].data if each in found and found[each].changed else None for each in parts
        ]
        # Signed: torch has no sums of uint64, and those of int64 wrap around the same way.
        told = torch.tensor(
            [
                [0 if each is None else each.numel() for each in sent],
                [
                    (found[each].after + 2**63) % 2**64 - 2**63 if each in found else 0
                    for each in parts
                ],
            ]
        )
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            on_device = told.to(self._device)
            dist.all_reduce(on_device, group=self._group)
            told = on_device.cpu()
        sizes, shares = told.tolist()
        flight = _Flight(0, self._group)
        came: list[torch.Tensor | None] = []
        for (member, part), size, data in zip(parts, sizes, sent, strict=True):
            keeper = self.keepers[member]
            if keeper != self.rank:
                if data is not None:
                    flight.add(dist.isend, data.to(self._device), keeper)
                    data = None
            elif size and part.rank != self.rank:
                data = torch.empty(size, dtype=torch.uint8, device=self._device)
                flight.add(dist.irecv, data, part.rank)
            came.append(data)
        flight.land()
        return [
            (share, None if data is None else EncodedDelta(data.cpu()))
            for share, data in zip(shares, came, strict=True)
        ]

    def _held(self, info: TensorInfo, part: TensorPart) -> OwnedSlice:
        return self._plan.held[(info.name, part.dim, part.start, part.size)]


def _keepers(plan: Plan, senders: int | None) -> list[int]:
    """Return for each tensor the rank that keeps it: one that has the tensor, or one near it."""
    owners = sorted({0, *(parts[0].rank for parts in plan.parts)})
    count = min(senders or len(owners), len(owners))
    # Consecutive owners share the first of them.
    shared = {owner: place * count // len(owners) for place, owner in enumerate(owners)}
    firsts = [next(owner for owner in owners if shared[owner] == group) for group in range(count)]
    return [firsts[shared[parts[0].rank]] for parts in plan.parts]


class Changes:
    """Fetches what has changed since the last export, found on the ranks that have it.

    Each rank keeps a copy, in host memory, of the parts that it sends. Of tensors with parts that
    split a word of 8 bytes, the keeper gets everything, and leaves out those that have not changed.
    """

    def __init__(self, whole: Shipping, plan: Plan, infos: tuple[TensorInfo, ...]) -> None:
        self.checksums: dict[str, int] = {}
        """The checksums of this rank's tensors as they were last sent."""
        self.began = False
        """True once there is something to find changes from."""
        self._whole, self._plan, self._infos = whole, plan, infos
        self._last = LastSent()
        self._split = [
            not all(part.of(info.shape).has_whole_words(info.dtype.itemsize) for part in parts)
            for info, parts in zip(infos, plan.parts, strict=True)
        ]

    def everything(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Fetch tensors whole; see `Shipping`."""
        self.began = True
        for member in members:
            for part, rows in () if self._split[member] else self._whole.mine(member):
                self._last.keep((member, part), rows)
        return self._whole(members)

    def __call__(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Return the deltas of tensors that have changed and that this rank keeps."""
        whole = [member for member in members if not self._split[member]]
        parts = [(member, part) for member in whole for part in self._plan.parts[member]]
        found = {}
        for member in whole:
            for part, rows in self._whole.mine(member):
                place = part.of(self._infos[member].shape)
                found[member, part] = self._last.delta((member, part), rows, before=0, part=place)
        sums = dict.fromkeys(whole, 0)
        changed: dict[int, list[tuple[Part, EncodedDelta]]] = {}
        for (member, part), (share, came) in zip(
            parts, self._whole.bring(parts, found), strict=True
        ):
            sums[member] += share
            if came is not None:
                place = part.of(self._infos[member].shape)
                changed.setdefault(member, []).append((place, came))
        tensors: dict[str, torch.Tensor] = {}
        for member in members:
            name, nbytes = self._infos[member].name, self._infos[member].nbytes
            before = self.checksums.get(name, 0)
            if self._split[member]:
                for tensor in self._whole((member,)).values():
                    if (now := checksum(tensor)) != before:
                        self.checksums[name], tensors[name] = now, tensor
            elif member in changed:
                self.checksums[name] = (nbytes + sums[member]) % 2**64
                delta = merged(changed[member], before=before, after=self.checksums[name])
                tensors[name + DELTA] = delta.data
        return tensors


class _Flight:
    """Holds messages under way, and the memory that is packed for them."""

    def __init__(self, most: int, group: dist.ProcessGroup | None) -> None:
        self._most, self._packed, self._group = most, 0, group
        self._messages: list[dist.P2POp] = []
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []

    def room(self, info: TensorInfo, part: TensorPart, device: torch.device) -> torch.Tensor:
        """Return memory for a packed part; wait for earlier messages if there is too little."""
        shape = list(info.shape)
        shape[part.dim] = part.size
        size = math.prod(shape) * info.dtype.itemsize
        if self._packed + size > self._most:
            self.land()
        self._packed += size
        return torch.empty(shape, dtype=info.dtype, device=device)

    def add(
        self,
        way: Callable[..., Any],
        rows: torch.Tensor,
        peer: int,
        into: torch.Tensor | None = None,
    ) -> None:
        flat = rows.reshape(-1).view(torch.uint8)  # as bytes: backends do not take all types
        self._messages.append(dist.P2POp(way, flat, group=self._group, group_peer=peer))
        if into is not None:
            self._arriving.append((rows, into))

    def land(self) -> None:
        """Wait for all messages, and put packed parts in place."""
        if self._messages:
            for work in dist.batch_isend_irecv(self._messages):
                work.wait()
        for packed, into in self._arriving:
            into.copy_(packed)
        self._messages.clear()
        self._arriving.clear()
        self._packed = 0


class MegatronWeights:
    """Implements `WeightSource` for the chunks of all ranks, in any parallel layout.

    The layout may have tensor, pipeline, virtual pipeline, expert and data parallel ranks. When the
    source is made, ranks tell each other once what they have. Then every part of a tensor goes to
    rank 0, or to the tensor's sender, from the lowest rank that has it, in one message. Tied
    embeddings are sent once, as the embedding; rows that pad the vocabulary are not sent.

    Parameters are read while a bucket is made: change none between the first bucket and the last.
    Iterating again reads them again.

    A sender holds its part of a bucket and at most one more tensor, in addition to what its caller
    keeps; others hold at most the largest of their shards.

    Example:
        source = MegatronWeights(chunks, Architecture.read(directory), dtype=torch.bfloat16)
        with source.buckets(bucket_bytes=1 << 30) as buckets:
            for bucket in buckets:
                ...
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        arch: Architecture,
        *,
        dtype: torch.dtype | None = None,
        fp8: Fp8Export | None = None,
        group: dist.ProcessGroup | None = None,
        deltas: bool = False,
        lora: Lora | None = None,
        senders: int | None = 1,
    ) -> None:
        """Begin with a collective of all ranks of the group.

        Args:
            chunks: this rank's chunks, bare or in DDP and Float16Module. DDP's pending gathers are
                finished whenever an iteration starts.
            arch: the chunks' architecture; the same on all ranks.
            dtype: the type that weights are cast to before they are sent; None for the parameters'
                own.
            fp8: quantizes matrices, on their senders, once they are whole. A ValueError of it, as
                for values that are not finite, is raised there only.
            group: ranks that have the whole model between them, the first of which is rank 0 here;
                None for the default group. With a group for each replica, each may have an engine
                of its own.
            deltas: True to find what has changed since the last export where it is, so that what
                goes to senders scales with it. Ranks keep a copy of what they send, in host memory.
                Without effect with `fp8`, which needs whole tensors.
            lora: the chunks' adapters, which are sent alone, by PEFT's names, to engines that have
                the base; None for a model without adapters.
            senders: the most ranks at which tensors arrive, each with a part of every bucket: the
                first ranks of pipeline stages and of expert-parallel ranks, which have the tensors.
                1 for rank 0 alone, which `save_hf` and `WeightSync` on a rank need; None for all.

        Raises:
            CheckpointMismatch: chunks that are not of that architecture, or not all of it.
            FailedElsewhere: the same on other ranks.
            ValueError: a dtype that is not of floating point; no sender.
        """
        if senders is not None and (type(senders) is not int or senders < 1):
            raise ValueError(
                f"MegatronWeights() got senders={senders!r}; allowed: 1 or more, or None"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"MegatronWeights() got dtype={dtype}; allowed: floating point")
        self._chunks, self._fp8 = list(chunks), fp8
        placed, error = None, None
        try:
            placed = placed_slots(self._chunks, arch, lora)
        except (ValueError, RuntimeError) as bad:
            error = bad
        plan = make_plan(
            hf_shapes(arch) if lora is None else lora.shapes(arch), placed, error, group=group
        )
        infos = plan.infos
        if dtype is not None:
            infos = tuple(dataclasses.replace(info, dtype=dtype) for info in infos)
        self._outputs = [_outputs(info, fp8) for info in infos]
        device = placed[0].parameter.device if placed else torch.device("cpu")
        self._fetch = Shipping(plan, infos, device, group, senders=senders)
        self._group, self._device = group, device
        self._changes = Changes(self._fetch, plan, infos) if deltas and fp8 is None else None

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return all tensors in the order in which they are sent; move no data."""
        return tuple(info for infos in self._outputs for info in infos)

    @property
    def keeps(self) -> bool:
        """True on ranks whose buckets have tensors."""
        return self._fetch.rank in (0, *self._fetch.keepers)

    @property
    def finds_changes(self) -> bool:
        """See `ChangesSource`."""
        return self._changes is not None

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> BucketStream:
        """Return a stream of the weights, read as they are while it is taken.

        All ranks call it, and take all buckets or close the stream. With deltas rank 0's `whole`
        holds for all; False gives what has changed since the last stream, see `ChangesSource`, and
        needs one with True before it.

        Errors: `ValueError` for a size that is no positive int.
        """
        finish_gathers(self._chunks)
        fetch: Fetch = self._fetch
        if self._changes is not None:
            whole = whole or not self._changes.began
            if dist.is_initialized() and dist.get_world_size(self._group) > 1:
                told = torch.tensor([whole], dtype=torch.int64, device=self._device)
                dist.broadcast(told, group=self._group, group_src=0)
                whole = bool(told)
            fetch = self._changes.everything if whole else self._changes
        return BucketStream(
            self._outputs,
            fetch,
            checksums=None if self._changes is None or not whole else self._changes.checksums,
            bucket_bytes=bucket_bytes,
            convert=None if self._fp8 is None else self._fp8.weights,
            keepers=self._fetch.keepers,
            rank=self._fetch.rank,
        )

    def quantization_config(self) -> dict[str, Any] | None:
        """Return config.json's entry for quantized weights; None if they are not."""
        if self._fp8 is None:
            return None
        metas = [
            (info.name, torch.empty(info.shape, dtype=info.dtype, device="meta"))
            for info in self.tensors()
        ]
        return self._fp8.quantization_config(
            (name, meta.to(torch.bfloat16) if meta.dtype == E4M3 else meta)
            for name, meta in metas
            if not name.endswith("_scale_inv")
        )


def _outputs(info: TensorInfo, fp8: Fp8Export | None) -> tuple[TensorInfo, ...]:
    """Return the tensors that one tensor is sent as: itself, or its codes and scales."""
    if fp8 is None or not fp8.converts(info.name, torch.empty(info.shape, device="meta")):
        return (info,)
    *lead, rows, columns = info.shape
    scales = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
    return (
        dataclasses.replace(info, dtype=E4M3),
        TensorInfo(name=f"{info.name}_scale_inv", shape=scales, dtype=torch.float32),
    )
