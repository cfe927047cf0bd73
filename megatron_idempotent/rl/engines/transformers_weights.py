"""Keeps the served and the staged weights with their versions, and swaps them at a commit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import torch

from megatron_idempotent.fp8.blockwise import BLOCK, E4M3, dequantize_blockwise
from megatron_idempotent.rl.weights import (
    Bucket,
    Staging,
    TensorInfo,
    UpdateDamaged,
    UpdateRefused,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.deltas import Patch
from megatron_idempotent.rl.weights.records import DELTA
from megatron_idempotent.rl.weights.staging import SideStream, used_here

from .protocol import EngineError, refuse_kv_scales, refuse_out_of_turn

_FACTOR = re.compile(r"\.(?P<factor>lora_[AB])(\.\w+)?\.weight$")
# transformers holds the experts of a layer in two tensors, [E, 2 I, H] and [E, H, I], and
# checkpoints have three matrices for each expert.
_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<fused>gate_up_proj|down_proj)$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ModelSlice:
    """Maps a tensor of a checkpoint to the model's tensor that holds it: to the whole tensor, or to
    one expert's rows in it.
    """

    info: TensorInfo
    """The checkpoint's tensor."""
    model_name: str
    """The name of the model's tensor."""
    part: tuple[int, slice] | None = None
    """The expert and its rows in the model's tensor; None for all of it."""


class ServedWeights:
    """Holds the tensors of the model that an engine serves, and replaces them by those of an
    update.

    A swap replaces pointers, so its time does not depend on the tensors' sizes, and the old tensors
    stay in memory until all are replaced. Patches are written in place. Tied weights are one
    tensor. With `adapters`, only PEFT's low-rank factors are swapped; all other tensors stay.
    """

    def __init__(self, model: Any, *, adapters: bool = False) -> None:
        # The tensors of a checkpoint, each once; tied tensors under their first name.
        saved: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(saved.items())}
        self._tensors = {
            name: tensor
            for name, tensor in saved.items()
            if first[id(tensor)] == name and (not adapters or _FACTOR.search(name))
        }
        if not self._tensors:
            raise ValueError(
                f"{type(model).__name__} has no lora_A and lora_B; load its adapters, as with PEFT,"
                " or leave adapters=True out"
            )
        self._infos = {name: TensorInfo.of(name, tensor) for name, tensor in self._tensors.items()}
        self._slices = {
            target.info.name: target
            for info in self._infos.values()
            for target in _checkpoint_slices(info)
        }
        self._replaced: dict[str, torch.Tensor | Patch] = {}
        self.device: torch.device = model.device

    @property
    def expected(self) -> tuple[TensorInfo, ...]:
        """The name, shape and dtype of every tensor of a full update, named as in a checkpoint."""
        return tuple(target.info for target in self._slices.values())

    def served(self, name: str) -> torch.Tensor:
        """Return a view of a served tensor, given the tensor's name in a checkpoint."""
        target = self._slices[name]
        tensor = self._tensors[target.model_name].data
        return tensor if target.part is None else tensor[target.part]

    @torch.no_grad()
    def assemble(
        self, tensors: Mapping[str, torch.Tensor | Patch]
    ) -> dict[str, torch.Tensor | Patch]:
        """Build new tensors for the model from an update's tensors, which are named and split as in
        a checkpoint. The served weights do not change.

        If an update has only some parts of a model's tensor, the other parts are copied from the
        served tensor. If an update has only patches for it, they are returned as they are.
        """
        assembled: dict[str, Any] = {}
        for name, tensor in sorted(tensors.items(), key=lambda item: isinstance(item[1], Patch)):
            target = self._slices[name]
            if isinstance(tensor, Patch):
                if target.model_name in assembled:
                    base = assembled[target.model_name][target.part]
                    tensor = dataclasses.replace(tensor, tensor=base)
                    tensor.write()
                else:
                    assembled[name] = tensor
            elif target.part is None:
                assembled[target.model_name] = tensor
            else:
                if target.model_name not in assembled:
                    assembled[target.model_name] = self._copy(target.model_name)
                expert, rows = target.part
                assembled[target.model_name][expert, rows] = tensor
        return assembled

    def exchange(self, tensors: Mapping[str, torch.Tensor | Patch]) -> None:
        """Write an update into the model: a tensor replaces the served one, and a `Patch` changes
        some elements of the served one in place. On an error, put the old tensors back, and raise
        the error. If they cannot be put back, `torn` is True.
        """
        try:
            for name, new in tensors.items():
                if name not in self._replaced:
                    old = new.reverse() if isinstance(new, Patch) else self._tensors[name].data
                    self._replaced[name] = old
                self._put(name, new)
        except Exception:
            self.restore()
            raise
        self._replaced.clear()

    def restore(self) -> None:
        """Put the old tensors back into the model after an `exchange` that failed."""
        for name in list(self._replaced):
            self._put(name, self._replaced[name])
            del self._replaced[name]

    @property
    def torn(self) -> bool:
        """True if the served tensors mix two versions, because an `exchange` and the restore after
        it failed.
        """
        return bool(self._replaced)

    def free(self) -> None:
        """Free the memory of all served tensors; the next `exchange` must bring all tensors."""
        self._replaced.clear()
        for name, tensor in self._tensors.items():
            self._put(name, tensor.data.new_empty(0))

    def _put(self, name: str, new: torch.Tensor | Patch) -> None:
        if isinstance(new, torch.Tensor):
            self._tensors[name].data = used_here(new)
        else:
            new.write()

    def _copy(self, name: str) -> torch.Tensor:
        info, served = self._infos[name], self._tensors[name].data
        if served.shape == info.shape:
            return served.clone()
        return torch.empty(
            info.shape, dtype=info.dtype, device=self.device
        )  # freed: the update has every part


def _checkpoint_slices(info: TensorInfo) -> list[_ModelSlice]:
    """List the checkpoint's tensors that are in the model's tensor `info`: one tensor, or the
    matrices of all experts if the model's tensor fuses the experts of a layer.
    """
    if (factor := _FACTOR.search(info.name)) is not None:
        # PEFT saves a factor without the adapter's name, below two wrappers that a bare model
        # lacks.
        name = info.name[: factor.start()].removeprefix("base_model.model.")
        name = f"base_model.model.{name}.{factor['factor']}.weight"
        return [_ModelSlice(info=dataclasses.replace(info, name=name), model_name=info.name)]
    match = _EXPERTS.fullmatch(info.name)
    if match is None or len(info.shape) != 3:
        return [_ModelSlice(info=info, model_name=info.name)]
    experts, rows, columns = info.shape
    if match["fused"] == "down_proj":
        parts = {"down_proj": slice(0, rows)}
    else:
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return [
        _ModelSlice(
            info=TensorInfo(
                name=f"{match['experts']}.{expert}.{projection}.weight",
                shape=(part.stop - part.start, columns),
                dtype=info.dtype,
            ),
            model_name=info.name,
            part=(expert, part),
        )
        for expert in range(experts)
        for projection, part in parts.items()
    ]


_SCALE = "_scale_inv"


class Incoming(Staging):
    """Collects and checks the tensors of one update, in the model's dtype or in FP8 as `Fp8Export`
    writes them.

    A matrix in E4M3 needs its float32 scales, as tensor `name` + `_scale_inv`, in the same bucket
    or a later one.
    """

    def __init__(self, update: WeightUpdate, *, weights: ServedWeights) -> None:
        """Start without tensors; `add` collects the tensors of `update` for the model `weights`.

        Args:
            update: the update to stage.
            weights: the served weights; staged tensors are kept on their device.
        """
        expected, device = weights.expected, weights.device
        super().__init__(update, expected=expected, served=weights.served)
        self._dtypes = {info.name: info.dtype for info in expected}
        self._device = device
        self.side = SideStream(device)
        """The CUDA stream for copies, so that they do not wait for the model's kernels."""

    def add(self, bucket: Bucket) -> None:
        """Check a bucket, and keep a copy of its tensors, because the sender may reuse the bucket's
        memory.

        Raises:
            WeightsError: as in `Staging.add`.
        """
        with self.side.complete():
            copies = {
                name: tensor.detach()
                .to("cpu" if name.endswith(DELTA) else self._device, copy=True)
                .contiguous()
                for name, tensor in bucket.tensors.items()
            }
            super().add(dataclasses.replace(bucket, tensors=copies))

    def complete(self) -> Mapping[str, Any]:
        """Check that all tensors have arrived, and return them by name; matrices in FP8 are
        dequantised to the model's dtype.

        On the host, patches become new tensors: writing a patch takes 20 ns per element there, and
        requests would wait for it. On a device, where memory is scarce and writes are fast, patches
        stay patches.

        Raises:
            UpdateDamaged: a matrix in FP8 has no scales, or as in `Staging.complete`.
        """
        received = super().complete()
        converted = {}
        for name, tensor in received.items():
            # Not `in_host_memory`: on a CPU rank, a simulated device costs as much as the host.
            if isinstance(tensor, Patch) and tensor.tensor.is_cpu:
                converted[name] = tensor.made()
            elif name in self._dtypes and getattr(tensor, "dtype", None) == E4M3:
                if name + _SCALE not in received:
                    raise UpdateDamaged(
                        f"update {self.update.id}: {name} came in {E4M3} without {name}{_SCALE}; "
                        "send both"
                    )
                converted[name] = dequantize_blockwise(
                    tensor, received[name + _SCALE], dtype=self._dtypes[name]
                )
            elif name in self._dtypes:
                converted[name] = tensor
        return converted

    def _check_fit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            info = self._expected.get(name)
            if tensor.dtype != E4M3 or info is None or len(info.shape) != 2:
                continue
            self._expected[name] = dataclasses.replace(info, dtype=E4M3)
            blocks = tuple(-(-size // BLOCK) for size in info.shape)
            scales = TensorInfo(name=name + _SCALE, shape=blocks, dtype=torch.float32)
            self._expected[scales.name] = scales
        super()._check_fit(tensors)


class WeightVersions:
    """Stages, commits and rolls back updates of one model's weights, and knows the served version.

    Call `commit` and `rollback` only while no forward is running. A commit that fails restores the
    previous weights; only if that also fails does the model mix two versions.
    """

    def __init__(self, weights: ServedWeights, *, name: str, version: int) -> None:
        self._weights = weights
        self._name = name
        self._last = version
        self._freed = ""
        self._torn_by = ""
        self.decode_s = 0.0
        """Seconds that decoding the last update's deltas took."""
        self._arriving: tuple[WeightUpdate, asyncio.Task[None]] | None = None
        self._staged: tuple[WeightUpdate, dict[str, torch.Tensor | Patch]] | None = None
        self._committed: WeightUpdate | None = None

    @property
    def version(self) -> int | None:
        """The version of the served weights; None if the weights were freed or mix two versions."""
        return None if self.trouble else self._last

    @property
    def trouble(self) -> str:
        """The reason why no version is served (weights were freed, or mix two versions); empty
        otherwise.
        """
        if self._torn_by:
            return f"update {self._torn_by} was committed in part; commit it again or roll it back"
        return self._freed

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Receive an update's buckets, check them, and keep the tensors for `commit`; see
        `RolloutEngine.stage`.

        Raises:
            UpdateRefused: also if the update is rolled back while it is being staged.
        """
        if self._committed == update:
            return
        refuse_kv_scales(self._name, update, "its key-value cache is not quantised")
        if self._committed is not None and self._committed.id == update.id:
            raise UpdateRefused(
                f"{self._name} got update {update.id} of version {update.version}, and has "
                f"committed another update with this id in version {self._committed.version}; "
                "give it another id"
            )
        refuse_out_of_turn(
            self._name,
            update,
            # Freed or torn weights may be sent again in their old version.
            least=self._last + 1 if self.version is not None else self._last,
            serving=self.version,
            staging="" if self._arriving is None else self._arriving[0].id,
        )
        self._staged = None
        task = asyncio.ensure_future(self._receive(update, buckets))
        self._arriving = (update, task)
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            self._arriving = None
        if task.cancelled():
            raise UpdateRefused(
                f"{self._name} gave up update {update.id} while it was staged: it was rolled back, "
                "or its weights were freed"
            )
        task.result()

    def commit(self, update_id: str) -> int:
        """Replace the model's tensors by those of the staged update; return the update's version.

        Raises:
            EngineError: the update is not staged, or its tensors cannot be swapped in.
        """
        if self._staged is None or self._staged[0].id != update_id:
            has = "nothing" if self._staged is None else f"update {self._staged[0].id}"
            raise EngineError(
                f"{self._name} cannot commit update {update_id}: it has {has} staged; stage it"
            )
        update, tensors = self._staged
        try:
            self._weights.exchange(tensors)
        except Exception as error:
            # The restore also undid an earlier attempt, unless `torn` is set.
            self._torn_by = update.id if self._weights.torn else ""
            raise EngineError(
                f"{self._name} could not commit update {update.id}: {type(error).__name__}: "
                f"{error}; {self.trouble if self._torn_by else 'the previous weights are restored'}"
            ) from error
        self._last, self._freed, self._torn_by = update.version, "", ""
        self._committed, self._staged = update, None
        return update.version

    def committed(self, update_id: str) -> int | None:
        """Return the served version if `update_id` is the update that was committed last, else
        None.
        """
        if self._committed is None or self._committed.id != update_id:
            return None
        return self.version

    async def rollback(self, update_id: str) -> None:
        """Drop a staged update, or undo a failed commit; see `RolloutEngine.rollback`.

        Raises:
            EngineError: the previous weights cannot be restored.
        """
        await self._give_up(update_id)
        if self._torn_by and self._torn_by == update_id:
            try:
                self._weights.restore()
            except Exception as error:
                raise EngineError(
                    f"{self._name} could not roll back update {update_id}: "
                    f"{type(error).__name__}: {error}; it stays DIRTY: stage all weights again"
                ) from error
            self._torn_by = ""
        if self._staged is not None and self._staged[0].id == update_id:
            self._staged = None

    async def free(self, reason: str) -> None:
        """Free the memory of the served weights, and drop an update that is staged or arriving.
        `trouble` returns `reason`, which says why there are no weights, until the next commit.
        """
        await self._give_up(None)
        self._staged = self._committed = None
        self._weights.free()
        self._freed, self._torn_by = reason, ""

    async def _give_up(self, update_id: str | None) -> None:
        if self._arriving is not None and update_id in (None, self._arriving[0].id):
            task = self._arriving[1]
            task.cancel()
            await asyncio.wait({task})

    async def _receive(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        incoming = Incoming(update, weights=self._weights)
        try:
            async for bucket in buckets:
                await asyncio.to_thread(incoming.add, bucket)
        finally:
            close = getattr(buckets, "aclose", None)
            if close is not None:
                with contextlib.suppress(Exception):  # the update's own error is the one to raise
                    await close()
        self._staged = (update, await asyncio.to_thread(self._assembled, incoming))
        self.decode_s = incoming.decode_s

    def _assembled(self, incoming: Incoming) -> dict[str, torch.Tensor | Patch]:
        with incoming.side.complete():
            return self._weights.assemble(incoming.complete())
