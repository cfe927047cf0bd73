"""Keeps the weights that are served and staged, with their versions, and exchanges all at once."""

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
class _Place:
    """Names the place of a checkpoint's tensor in the model."""

    info: TensorInfo
    whole: str
    """The name of the model's own tensor."""
    part: tuple[int, slice] | None = None
    """The expert and its rows; None for the whole tensor."""


class ServedWeights:
    """Serves a model's parameters and saved buffers, and exchanges them.

    Tensors are exchanged by pointer: the time does not depend on their size, and old tensors are
    there until the last of them is replaced. Patches are written in place. Tied weights are one
    tensor. With `adapters`, PEFT's low-rank factors alone are exchanged, and the rest stays as it
    is.
    """

    def __init__(self, model: Any, *, adapters: bool = False) -> None:
        # Those that a checkpoint has, each once; tied ones under their first name.
        saved: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(saved.items())}
        self._tensors = {
            name: each
            for name, each in saved.items()
            if first[id(each)] == name and (not adapters or _FACTOR.search(name))
        }
        if not self._tensors:
            raise ValueError(
                f"{type(model).__name__} has no lora_A and lora_B; load its adapters, as with PEFT,"
                " or leave adapters=True out"
            )
        self._infos = {name: TensorInfo.of(name, each) for name, each in self._tensors.items()}
        self._places = {
            place.info.name: place
            for info in self._infos.values()
            for place in _checkpoint_places(info)
        }
        self._before: dict[str, torch.Tensor | Patch] = {}
        self.device: torch.device = model.device

    @property
    def expected(self) -> tuple[TensorInfo, ...]:
        """Every tensor of an update, by its name in a checkpoint."""
        return tuple(place.info for place in self._places.values())

    def served(self, name: str) -> torch.Tensor:
        """Return a tensor as it is served, by its name in a checkpoint; a view."""
        place = self._places[name]
        whole = self._tensors[place.whole].data
        return whole if place.part is None else whole[place.part]

    @torch.no_grad()
    def assemble(
        self, tensors: Mapping[str, torch.Tensor | Patch]
    ) -> dict[str, torch.Tensor | Patch]:
        """Return the model's own tensors, put together from those of a checkpoint, and patches.

        The served weights do not change. If only some parts of a tensor come, the others are copied
        from what is served. If none comes whole, patches stay as they are.
        """
        whole: dict[str, Any] = {}
        for name, tensor in sorted(tensors.items(), key=lambda item: isinstance(item[1], Patch)):
            place = self._places[name]
            if isinstance(tensor, Patch):
                if place.whole in whole:
                    tensor = dataclasses.replace(tensor, tensor=whole[place.whole][place.part])
                    tensor.write()
                else:
                    whole[name] = tensor
            elif place.part is None:
                whole[place.whole] = tensor
            else:
                if place.whole not in whole:
                    whole[place.whole] = self._copy(place.whole)
                expert, rows = place.part
                whole[place.whole][expert, rows] = tensor
        return whole

    def exchange(self, whole: Mapping[str, torch.Tensor | Patch]) -> None:
        """Serve these tensors. If it raises, `torn` says whether all old ones are back."""
        try:
            for name, new in whole.items():
                if name not in self._before:
                    old = new.reverse() if isinstance(new, Patch) else self._tensors[name].data
                    self._before[name] = old
                self._put(name, new)
        except Exception:
            self.restore()
            raise
        self._before.clear()

    def restore(self) -> None:
        """Serve what was served before an exchange that failed."""
        for name in list(self._before):
            self._put(name, self._before[name])
            del self._before[name]

    @property
    def torn(self) -> bool:
        """True if tensors of more than one version are served."""
        return bool(self._before)

    def free(self) -> None:
        """Give up all tensors' memory; an exchange of all of them takes it again."""
        self._before.clear()
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
        return torch.empty(info.shape, dtype=info.dtype, device=self.device)  # freed: all come


def _checkpoint_places(info: TensorInfo) -> list[_Place]:
    """Return the places of a checkpoint's tensors in one of the model's tensors."""
    if (factor := _FACTOR.search(info.name)) is not None:
        # PEFT saves it without the adapter's name, below two wrappers that a bare model lacks.
        name = info.name[: factor.start()].removeprefix("base_model.model.")
        name = f"base_model.model.{name}.{factor['factor']}.weight"
        return [_Place(info=dataclasses.replace(info, name=name), whole=info.name)]
    found = _EXPERTS.fullmatch(info.name)
    if found is None or len(info.shape) != 3:
        return [_Place(info=info, whole=info.name)]
    experts, rows, columns = info.shape
    if found["fused"] == "down_proj":
        parts = {"down_proj": slice(0, rows)}
    else:
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return [
        _Place(
            info=TensorInfo(
                name=f"{found['experts']}.{expert}.{projection}.weight",
                shape=(part.stop - part.start, columns),
                dtype=info.dtype,
            ),
            whole=info.name,
            part=(expert, part),
        )
        for expert in range(experts)
        for projection, part in parts.items()
    ]


_SCALE = "_scale_inv"


class Incoming(Staging):
    """Gathers an update's tensors, each as the model has it or as `Fp8Export` makes it.

    A matrix in E4M3 needs its scales, float32, as `name` + `_scale_inv`, in its own bucket or a
    later one.
    """

    def __init__(self, update: WeightUpdate, *, weights: ServedWeights) -> None:
        """
        Args:
            update: the update that is staged.
            weights: what is served; tensors are kept on its device.
        """
        expected, device = weights.expected, weights.device
        super().__init__(update, expected=expected, served=weights.served)
        self._dtypes = {info.name: info.dtype for info in expected}
        self._device = device
        self.side = SideStream(device)
        """The CUDA stream for copies, so that they do not wait for what the model computes."""

    def add(self, bucket: Bucket) -> None:
        """Check a copy of the bucket and keep it: its sender may free or change what it sent.

        Errors: those of `Staging.add`.
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
        """Return all tensors in the model's own types. Errors: those of `Staging.complete`.

        On the host patches become new tensors: to write them there takes 20 ns for each element, in
        which requests would wait. On a device, where memory is scarce and that is fast, they stay.
        """
        came = super().complete()
        whole = {}
        for name, tensor in came.items():
            # Not `in_host_memory`: what stands for a device on a CPU rank costs what the host does.
            if isinstance(tensor, Patch) and tensor.tensor.is_cpu:
                whole[name] = tensor.made()
            elif name in self._dtypes and getattr(tensor, "dtype", None) == E4M3:
                if name + _SCALE not in came:
                    raise UpdateDamaged(
                        f"update {self.update.id}: {name} came in {E4M3} without {name}{_SCALE}; "
                        "send both"
                    )
                whole[name] = dequantize_blockwise(
                    tensor, came[name + _SCALE], dtype=self._dtypes[name]
                )
            elif name in self._dtypes:
                whole[name] = tensor
        return whole

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
    """Stages, commits and takes back updates of one model's weights.

    Call `commit` and `rollback` only while no forward is running. An exchange that fails puts back
    what was there; only if that fails, too, are weights of two versions in the model.
    """

    def __init__(self, weights: ServedWeights, *, name: str, version: int) -> None:
        self._weights = weights
        self._name = name
        self._last = version
        self._freed = ""
        self._torn_by = ""
        self.decode_s = 0.0
        """Seconds in which deltas of the last update were decoded."""
        self._arriving: tuple[WeightUpdate, asyncio.Task[None]] | None = None
        self._staged: tuple[WeightUpdate, dict[str, torch.Tensor | Patch]] | None = None
        self._committed: WeightUpdate | None = None

    @property
    def version(self) -> int | None:
        """The version that is served; None if the weights were freed, or are torn."""
        return None if self.trouble else self._last

    @property
    def trouble(self) -> str:
        """The reason why no version is served; empty if one is."""
        if self._torn_by:
            return f"update {self._torn_by} was committed in part; commit it again or roll it back"
        return self._freed

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. It raises `UpdateRefused` if it is rolled back meanwhile."""
        if self._committed == update:
            return
        refuse_kv_scales(self._name, update, "its key-value cache is not quantised")
        if self._committed is not None and self._committed.id == update.id:
            raise UpdateRefused(
                f"{self._name} was given update {update.id} of version {update.version} and has "
                f"committed one of that id in version {self._committed.version}; give it another id"
            )
        refuse_out_of_turn(
            self._name,
            update,
            # Weights that were freed, or are torn, may come again in the version that they had.
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
        """Serve the staged update; return its version.

        Errors: `EngineError` for an id that is not staged, or if tensors cannot be exchanged.
        """
        if self._staged is None or self._staged[0].id != update_id:
            has = "nothing" if self._staged is None else f"update {self._staged[0].id}"
            raise EngineError(
                f"{self._name} was to commit update {update_id} and has {has} staged; stage it"
            )
        update, tensors = self._staged
        try:
            self._weights.exchange(tensors)
        except Exception as error:
            # What an earlier attempt had left is back as well, unless this one left something.
            self._torn_by = update.id if self._weights.torn else ""
            raise EngineError(
                f"{self._name} could not commit update {update.id}: {type(error).__name__}: "
                f"{error}; {self.trouble if self._torn_by else 'what was there before is back'}"
            ) from error
        self._last, self._freed, self._torn_by = update.version, "", ""
        self._committed, self._staged = update, None
        return update.version

    def committed(self, update_id: str) -> int | None:
        """Return the version of the last commit if this is its id and its weights are served."""
        if self._committed is None or self._committed.id != update_id:
            return None
        return self.version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`. Errors: `EngineError` if weights cannot be restored."""
        await self._give_up(update_id)
        if self._torn_by and self._torn_by == update_id:
            try:
                self._weights.restore()
            except Exception as error:
                raise EngineError(
                    f"{self._name} could not take back update {update_id}: "
                    f"{type(error).__name__}: {error}; it stays DIRTY: stage all weights again"
                ) from error
            self._torn_by = ""
        if self._staged is not None and self._staged[0].id == update_id:
            self._staged = None

    async def free(self, why: str) -> None:
        """Give up all weights: served, staged and arriving ones; `why` becomes the trouble."""
        await self._give_up(None)
        self._staged = self._committed = None
        self._weights.free()
        self._freed, self._torn_by = why, ""

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
                with contextlib.suppress(Exception):  # the update's own error is the one to see
                    await close()
        self._staged = (update, await asyncio.to_thread(self._assembled, incoming))
        self.decode_s = incoming.decode_s

    def _assembled(self, incoming: Incoming) -> dict[str, torch.Tensor | Patch]:
        with incoming.side.complete():
            return self._weights.assemble(incoming.complete())
