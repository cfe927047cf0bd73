"""Exports a Megatron model's weights, unsharded and under Hugging Face names."""

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
    """A range of a tensor along `dim`, and the rank that sends this range in an export."""

    dim: int
    start: int
    size: int
    rank: int

    def of(self, shape: tuple[int, ...]) -> Part:
        """Return this range as a `Part` of a tensor with the shape `shape`."""
        return Part(shape, self.dim, self.start, self.size)


class OwnedSlice(NamedTuple):
    """A part of a Hugging Face tensor that this rank has, together with the Megatron parameter that
    holds the part.
    """

    share: SlotPart
    placed: Placed

    def consecutive(self) -> torch.Tensor | None:
        """Return a view of the part in the parameter's memory if the part is contiguous there, else
        None.
        """
        (start, size), *further = self.share.segments
        rows = self.placed.view.narrow(self.share.dim, start, size)
        return rows if not further and rows.is_contiguous() else None

    def copy(self, into: torch.Tensor) -> None:
        offset, dim, view = 0, self.share.dim, self.placed.view
        for start, size in self.share.segments:
            into.narrow(dim, offset, size).copy_(view.narrow(dim, start, size))
            offset += size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of an export: all tensors in the order of sending, and for each tensor its parts
    with the ranks that send them.
    """

    infos: tuple[TensorInfo, ...]
    """The tensors, with the parameters' dtypes."""
    parts: tuple[tuple[TensorPart, ...], ...]
    """The parts of each tensor, in order along their dimension."""
    owned: Mapping[tuple[str, int, int, int], OwnedSlice]
    """The parts on this rank, by name, dimension, start and size."""


def make_plan(
    shapes: Mapping[str, tuple[int, ...]],
    placed: Sequence[Placed] | None,
    error: BaseException | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Gather from all ranks of `group` which parts of tensors each rank has, and choose for each
    part the rank that sends it. A collective of `group`; without torch.distributed, of this process
    alone.

    Args:
        shapes: the shapes of all tensors, in order.
        placed: this rank's slots; None if finding them failed.
        error: the error in that case; all ranks then raise.
        group: the ranks that have the model; None for the default group.

    Raises:
        FailedElsewhere: another rank has an error.
        CheckpointMismatch: no rank has some part of a tensor, or dtypes differ between ranks.
    """
    owned: dict[tuple[str, int, int, int], OwnedSlice] = {}
    for placed_slot in placed or ():
        for share in placed_slot.slot.shares():
            owned.setdefault(share.place, OwnedSlice(share, placed_slot))
    dtypes_here = {key: part.placed.parameter.dtype for key, part in owned.items()}
    parts_of_ranks: list[Any] = [
        (dtypes_here, None if error is None else f"{type(error).__name__}: {error}")
    ]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        local, parts_of_ranks = parts_of_ranks[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(parts_of_ranks, local, group=group)
    if error is not None:
        raise error
    failed = [
        f"rank {rank}: {text}" for rank, (_, text) in enumerate(parts_of_ranks) if text is not None
    ]
    if failed:
        raise FailedElsewhere(f"there is nothing to export: {listed(failed)}")
    owners: dict[str, dict[tuple[int, int, int], tuple[int, torch.dtype]]] = {}
    wrong: list[str] = []
    for rank, (dtypes_by_key, _) in enumerate(parts_of_ranks):
        for (name, *span), dtype in dtypes_by_key.items():
            dim, start, size = span
            _, first_dtype = owners.setdefault(name, {}).setdefault(
                (dim, start, size), (rank, dtype)
            )
            if first_dtype != dtype:
                wrong.append(f"{name} is {first_dtype} and {dtype} on rank {rank}")
    infos, parts = [], []
    for name, shape in shapes.items():
        parts_of_name = owners.get(name, {})
        ordered = tuple(
            TensorPart(*span, rank) for span, (rank, _) in sorted(parts_of_name.items())
        )
        if not _covers(ordered, shape):
            spans = [f"{start} to {start + size}" for _, start, size, _ in ordered]
            wrong.append(f"of {name} {list(shape)} there is {', '.join(spans) or 'nothing'}")
            continue
        dtypes = {dtype for _, dtype in parts_of_name.values()}
        if len(dtypes) > 1:
            wrong.append(f"{name} is of several types, {sorted(map(str, dtypes))}")
        infos.append(TensorInfo(name=name, shape=shape, dtype=dtypes.pop()))
        parts.append(ordered)
    if wrong:
        raise CheckpointMismatch(
            f"the ranks' chunks do not make up the model: {listed(wrong)}; pass all chunks of "
            "every rank"
        )
    return Plan(infos=tuple(infos), parts=tuple(parts), owned=owned)


def _covers(parts: Sequence[TensorPart], shape: Sequence[int]) -> bool:
    """Return True if a tensor's parts are ranges along one dimension that follow one another
    without gaps or overlap, from the dimension's start to its end.
    """
    end = 0
    for part in parts:
        if part.dim != parts[0].dim or part.start != end:
            return False
        end += part.size
    return bool(parts) and end == shape[parts[0].dim]


class Shipping:
    """Sends each part of a tensor to the tensor's keeper, the rank that gets the complete tensor.
    `BucketStream` calls a `Shipping` to fetch the tensors of a bucket.

    Contiguous parts are sent without a copy. Parts that are not contiguous, or have another dtype,
    are packed first; the packed bytes never exceed the largest part that a rank sends, or the
    largest tensor that it keeps.
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
        """Choose the keeper of each tensor, and set the most bytes that packed parts (contiguous
        copies of parts) may take on this rank at a time.

        Args:
            plan: the result of `make_plan`.
            infos: the tensors with the dtypes in which they arrive.
            device: the device of the tensors that ranks keep.
            group: the plan's group; None for the default group.
            senders: as for `MegatronWeights`.
        """
        self._plan, self._infos, self._device, self._group = plan, infos, device, group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.keepers = _keepers(plan, senders)
        """The rank that keeps each tensor."""
        packed = [
            info.nbytes
            for info, keeper in zip(infos, self.keepers, strict=True)
            if self.rank == keeper
        ]
        for info, parts in zip(infos, plan.parts, strict=True):
            packed += [
                info.nbytes // info.shape[part.dim] * part.size
                for part in parts
                if part.rank == self.rank
            ]
        self._packing = max(packed, default=0)

    def __call__(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Send and receive the parts of the tensors `members`; return the tensors that this rank
        keeps, unsharded. A collective.
        """
        tensors: dict[str, torch.Tensor] = {}
        flight = _Flight(self._packing, self._group)
        for member in members:
            info, keeper = self._infos[member], self.keepers[member]
            if keeper == self.rank:
                tensor = torch.empty(info.shape, dtype=info.dtype, device=self._device)
                tensors[info.name] = tensor
            for part in self._plan.parts[member]:
                if keeper == self.rank:
                    self._receive(info, part, flight, tensors[info.name])
                elif part.rank == self.rank:
                    self._send(info, part, flight, keeper)
        flight.land()
        return tensors

    def own_parts(self, member: int) -> Iterator[tuple[TensorPart, torch.Tensor]]:
        """Yield the parts of a tensor that this rank sends, in the dtype that is sent, possibly as
        views of parameters.
        """
        info = self._infos[member]
        for part in self._plan.parts[member]:
            if part.rank == self.rank:
                owned = self._owned(info, part)
                rows = owned.consecutive()
                if rows is None or rows.dtype != info.dtype:
                    shape = list(info.shape)
                    shape[part.dim] = part.size
                    rows = owned.placed.parameter.new_empty(shape, dtype=info.dtype)
                    owned.copy(rows)
                yield part, rows

    def _send(self, info: TensorInfo, part: TensorPart, flight: _Flight, keeper: int) -> None:
        owned = self._owned(info, part)
        rows = owned.consecutive()
        if rows is None or rows.dtype != info.dtype:
            rows = flight.room(info, part, owned.placed.parameter.device)
            owned.copy(rows)
        flight.add(dist.isend, rows, keeper)

    def _receive(
        self, info: TensorInfo, part: TensorPart, flight: _Flight, tensor: torch.Tensor
    ) -> None:
        rows = tensor.narrow(part.dim, part.start, part.size)
        if part.rank == self.rank:
            self._owned(info, part).copy(rows)
        elif rows.is_contiguous():
            flight.add(dist.irecv, rows, part.rank)
        else:
            flight.add(dist.irecv, flight.room(info, part, self._device), part.rank, into=rows)

    def bring(
        self,
        parts: Sequence[tuple[int, TensorPart]],
        deltas: Mapping[tuple[int, TensorPart], EncodedDelta],
    ) -> Sequence[tuple[int, EncodedDelta | None]]:
        """Send the delta of each part in `parts` to the keeper of the part's tensor. Return, for
        each part, how much it contributes to the tensor's checksum, and its delta.

        A collective: all ranks call it with the same parts.

        Returns:
            For each part the `after` checksum of its delta, on all ranks, and the delta. The delta
            is None if the part has not changed, and on ranks other than the keeper.
        """
        sent = [
            deltas[part].data if part in deltas and deltas[part].changed else None for part in parts
        ]
        # Signed: torch cannot sum uint64, and sums of int64 wrap around the same way.
        counts = torch.tensor(
            [
                [0 if data is None else data.numel() for data in sent],
                [
                    (deltas[part].after + 2**63) % 2**64 - 2**63 if part in deltas else 0
                    for part in parts
                ],
            ]
        )
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            on_device = counts.to(self._device)
            dist.all_reduce(on_device, group=self._group)
            counts = on_device.cpu()
        sizes, shares = counts.tolist()
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

    def _owned(self, info: TensorInfo, part: TensorPart) -> OwnedSlice:
        return self._plan.owned[(info.name, part.dim, part.start, part.size)]


def _keepers(plan: Plan, senders: int | None) -> list[int]:
    """Return the keeper of each tensor, the rank that gets the complete tensor. At most `senders`
    different ranks are keepers; None for no limit.

    Without a limit, a tensor's keeper is the rank that sends its first part. Otherwise these ranks
    and rank 0 are divided into `senders` groups of consecutive ranks, and the first rank of a group
    keeps all tensors of the group.
    """
    owners = sorted({0, *(parts[0].rank for parts in plan.parts)})
    count = min(senders or len(owners), len(owners))
    # Consecutive owners are grouped; the first of a group keeps all of its tensors.
    shared = {owner: index * count // len(owners) for index, owner in enumerate(owners)}
    firsts = [next(owner for owner in owners if shared[owner] == group) for group in range(count)]
    return [firsts[shared[parts[0].rank]] for parts in plan.parts]


class Changes:
    """Finds the tensors that changed since the last export, and brings their deltas to their
    keepers. `BucketStream` calls a `Changes` to fetch the changes of a bucket's tensors.

    Each rank keeps a copy in host memory of the parts that it sends, and computes their deltas. If
    a part boundary splits an 8-byte word, the keeper fetches the entire tensor, and drops it if it
    has not changed.
    """

    def __init__(self, shipping: Shipping, plan: Plan, infos: tuple[TensorInfo, ...]) -> None:
        self.checksums: dict[str, int] = {}
        """The checksums of the tensors that this rank keeps, at the last export."""
        self.began = False
        """True once there is an export to compare with."""
        self._shipping, self._plan, self._infos = shipping, plan, infos
        self._last = LastSent()
        self._split = [
            not all(part.of(info.shape).has_whole_words(info.dtype.itemsize) for part in parts)
            for info, parts in zip(infos, plan.parts, strict=True)
        ]

    def everything(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Fetch the complete tensors `members`, changed or not, and copy this rank's parts for the
        next comparison; see `Shipping`.
        """
        self.began = True
        for member in members:
            for part, rows in () if self._split[member] else self._shipping.own_parts(member):
                self._last.keep((member, part), rows)
        return self._shipping(members)

    def __call__(self, members: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Find out on all ranks which of the tensors `members` have changed. Return the changed
        tensors that this rank keeps: each as one delta or, if the border between two parts splits
        an 8-byte word, in full. A collective.
        """
        unsplit = [member for member in members if not self._split[member]]
        parts = [(member, part) for member in unsplit for part in self._plan.parts[member]]
        deltas = {}
        for member in unsplit:
            for part, rows in self._shipping.own_parts(member):
                location = part.of(self._infos[member].shape)
                deltas[member, part] = self._last.delta(
                    (member, part), rows, before=0, part=location
                )
        sums = dict.fromkeys(unsplit, 0)
        changed: dict[int, list[tuple[Part, EncodedDelta]]] = {}
        for (member, part), (share, came) in zip(
            parts, self._shipping.bring(parts, deltas), strict=True
        ):
            sums[member] += share
            if came is not None:
                location = part.of(self._infos[member].shape)
                changed.setdefault(member, []).append((location, came))
        tensors: dict[str, torch.Tensor] = {}
        for member in members:
            name, nbytes = self._infos[member].name, self._infos[member].nbytes
            old_sum = self.checksums.get(name, 0)
            if self._split[member]:
                for tensor in self._shipping((member,)).values():
                    if (new_sum := checksum(tensor)) != old_sum:
                        self.checksums[name], tensors[name] = new_sum, tensor
            elif member in changed:
                self.checksums[name] = (nbytes + sums[member]) % 2**64
                delta = merged(changed[member], before=old_sum, after=self.checksums[name])
                tensors[name + DELTA] = delta.data
        return tensors


class _Flight:
    """Collects point-to-point messages, then sends and receives them together. The packed parts
    (contiguous copies of parts) of the collected messages take at most `most` bytes.
    """

    def __init__(self, most: int, group: dist.ProcessGroup | None) -> None:
        self._most, self._packed, self._group = most, 0, group
        self._messages: list[dist.P2POp] = []
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []

    def room(self, info: TensorInfo, part: TensorPart, device: torch.device) -> torch.Tensor:
        """Allocate memory for the packed (contiguous) copy of a part of a tensor, and return it. If
        all packed parts would then exceed the limit, first send and receive the collected messages
        (`land`).
        """
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
        flat = rows.reshape(-1).view(torch.uint8)  # as bytes: backends do not support all dtypes
        self._messages.append(dist.P2POp(way, flat, group=self._group, group_peer=peer))
        if into is not None:
            self._arriving.append((rows, into))

    def land(self) -> None:
        """Send and receive all collected messages, wait for their end, and copy received packed
        parts to their tensors.
        """
        if self._messages:
            for work in dist.batch_isend_irecv(self._messages):
                work.wait()
        for packed, into in self._arriving:
            into.copy_(packed)
        self._messages.clear()
        self._arriving.clear()
        self._packed = 0


class MegatronWeights:
    """Implements `WeightSource` for a Megatron model: exports the weights of all ranks' model
    chunks, in any parallel layout.

    The layout may have tensor, pipeline, virtual pipeline, expert and data parallel ranks. The
    constructor gathers once which rank has which part. Then every part of a tensor goes from the
    lowest rank that has it to rank 0, or to another of the `senders`, in one message. Tied
    embeddings are sent once, as the embedding; the vocabulary's padding rows are not sent.

    Parameters are read while buckets are made: change none between the first and the last bucket.
    Another iteration reads them again.

    A sender needs memory for its part of a bucket and at most one more tensor, in addition to what
    its caller keeps; other ranks need memory for at most their largest shard.

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
        """Gather from all ranks which rank has which part of each tensor, and plan the export. A
        collective of `group`.

        Args:
            chunks: this rank's chunks, bare or wrapped in DDP and Float16Module. DDP's pending
                gathers are finished whenever an iteration starts.
            arch: the chunks' architecture; the same on all ranks.
            dtype: the dtype to send weights in; None for the parameters' dtypes.
            fp8: quantizes complete matrices, on their senders. Its ValueError, such as for values
                that are not finite, is raised on that sender only.
            group: ranks that together have the entire model, the first of which is rank 0 here;
                None for the default group. Data-parallel replicas may have a group and an engine
                each.
            deltas: True to compute changes since the last export on the ranks that have the
                parameters, so that traffic to the senders scales with the changes. Ranks keep a
                copy of what they send in host memory. Ignored with `fp8`, which needs complete
                tensors.
            lora: the chunks' adapters: only these are sent, under PEFT's names, to engines that
                have the base model; None for a model without adapters.
            senders: the most ranks that keep tensors, each with a part of every bucket: the first
                ranks of pipeline stages and of expert-parallel ranks. 1 for rank 0 alone, which
                `save_hf` and `WeightSync` on a rank need; None for no limit.

        Raises:
            CheckpointMismatch: the chunks are not of this architecture, or are incomplete.
            FailedElsewhere: another rank raised `CheckpointMismatch`.
            ValueError: `dtype` is not a floating-point type, or `senders` is below 1.
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
        self.keeps = self._fetch.rank in (0, *self._fetch.keepers)
        """True on ranks whose buckets have tensors."""
        self._group, self._device = group, device
        self._changes = Changes(self._fetch, plan, infos) if deltas and fp8 is None else None

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the name, shape and dtype of all tensors, in the order of sending, without
        communication.
        """
        return tuple(info for infos in self._outputs for info in infos)

    @property
    def finds_changes(self) -> bool:
        """True if the source was made with `deltas` and without `fp8`: `buckets(whole=False)` then
        yields only the changes since the last export; see `ChangesSource`.
        """
        return self._changes is not None

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> BucketStream:
        """Return an iterator over the weights in buckets, which reads the model's parameters when
        it makes a bucket.

        A collective: all ranks call it, and take all buckets or close the stream. With deltas, rank
        0's `whole` applies to all ranks; False yields only the changes since the last stream (see
        `ChangesSource`), after at least one stream with True.

        Raises:
            ValueError: `bucket_bytes` is not a positive int.
        """
        finish_gathers(self._chunks)
        fetch: Fetch = self._fetch
        if self._changes is not None:
            whole = whole or not self._changes.began
            if dist.is_initialized() and dist.get_world_size(self._group) > 1:
                choice = torch.tensor([whole], dtype=torch.int64, device=self._device)
                dist.broadcast(choice, group=self._group, group_src=0)
                whole = bool(choice)
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
        """Return the `quantization_config` of the exported weights, for config.json; None without
        quantization.
        """
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
    """Return the name, shape and dtype of what is sent for the tensor `info`: the tensor itself or,
    if `fp8` converts it, its FP8 codes and their scales.
    """
    if fp8 is None or not fp8.converts(info.name, torch.empty(info.shape, device="meta")):
        return (info,)
    *lead, rows, columns = info.shape
    scales = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
    return (
        dataclasses.replace(info, dtype=E4M3),
        TensorInfo(name=f"{info.name}_scale_inv", shape=scales, dtype=torch.float32),
    )
