"""Receives updates in a vLLM worker, tracks the served version, and writes updates in place.

This module does not import vLLM; `vllm_worker` does.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent.rl.weights import (
    Staging,
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.deltas import Patch
from megatron_idempotent.rl.weights.records import listed
from megatron_idempotent.rl.weights.transports import Receiver, receiver
from megatron_idempotent.rl.weights.transports.bucket import VARIABLE
from megatron_idempotent.rl.weights.urls import place_of, refuse_secrets

from .protocol import EngineUnsupported, refuse_out_of_turn


class IncomingUpdate:
    """Receives and checks the buckets of one update in a thread of a vLLM worker, without touching
    the model.

    Example:
        staging = Staging(update, expected=infos)
        arrival = IncomingUpdate(staging, lambda: receiver(opened), silence_s=60.0)
        arrival.announce(announced)
        arrival.received                # counts up
        arrival.complete(buckets=1)     # checks that all tensors arrived
    """

    def __init__(
        self, staging: Staging, connect: Callable[[], Receiver], *, silence_s: float
    ) -> None:
        """Start the thread that receives and checks the update's buckets.

        Args:
            staging: checks and keeps the tensors of the update to receive.
            connect: returns the receiver of the buckets, in the thread that receives them.
            silence_s: seconds without an announced bucket after which the update is dropped.
        """
        self.update = staging.update
        self.received, self.decode_s = 0, 0.0
        self.error: Exception | None = None
        self.tensors: Mapping[str, Any] | None = None
        self._staging: Staging | None = staging
        self._announced: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        # The thread must use the model's GPU: the default device of a new thread is the first GPU.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        arguments = connect, silence_s, torch.cuda.current_device() if started else None
        # A daemon: a sender that hangs must not keep the process alive.
        threading.Thread(
            target=self._run, args=arguments, name=f"stage {self.update.id}", daemon=True
        ).start()

    @property
    def busy(self) -> bool:
        """True while the update is being received: it is neither complete nor failed."""
        return self.tensors is None and self.error is None

    def announce(self, announced: Mapping[str, Any]) -> None:
        """Queue a sender's announcement of a bucket, and return at once; this update's thread then
        receives the bucket.
        """
        self._announced.put(announced)

    def complete(self, buckets: int) -> None:
        """Check that `buckets` buckets with all tensors arrived, and set `tensors` to the update's
        tensors.

        Raises:
            UpdateDamaged: buckets or tensors are missing.
            Exception: the error that ended the receiving thread.
        """
        if self.error is not None:
            raise self.error
        if self._staging is None or self.received != buckets:
            raise UpdateDamaged(
                f"update {self.update.id}: {self.received} of {buckets} buckets arrived; send "
                "the update again"
            )
        self.decode_s = self._staging.decode_s
        try:
            self.tensors = self._staging.complete()
        except UpdateDamaged as error:
            self._fail(error)
            raise
        finally:
            self._announced.put(None)

    def drop(self) -> None:
        """Give up the update, and free its tensors; the thread that receives the update ends after
        the current bucket.
        """
        self._fail(UpdateDamaged(f"update {self.update.id} was dropped"))
        self._announced.put(None)

    def _fail(self, error: Exception) -> None:
        self.error, self.tensors, self._staging = error, None, None

    def _run(self, connect: Callable[[], Receiver], silence_s: float, gpu: int | None) -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            inbound = connect()
            try:
                while (announced := self._announced.get(timeout=silence_s)) is not None:
                    bucket = inbound.receive(announced)
                    staging = self._staging
                    if staging is None:
                        return
                    staging.add(bucket)
                    self.received += 1
            finally:
                inbound.close()
        except queue.Empty:
            self._fail(
                UpdateDamaged(
                    f"update {self.update.id}: no bucket in {silence_s:g} s after "
                    f"{self.received}; is the trainer still there? Send the update again"
                )
            )
        except Exception as error:  # noqa: BLE001 (the client raises it)
            if self.error is None:  # else it was dropped
                self._fail(error)


class Patched(Mapping[str, torch.Tensor]):
    """A read-only mapping of names to the tensors after an update: the update's tensors (`came`),
    and the served tensors that the update does not change. Where the update has a `Patch`, new
    values of some elements, each lookup makes a changed copy of the served tensor.

    Example: `Patched(served, {"norm.weight": tensor, "head.weight": patch})`.
    """

    def __init__(
        self, served: Mapping[str, torch.Tensor], came: Mapping[str, torch.Tensor | Patch]
    ) -> None:
        self.served, self.came = served, came

    def __getitem__(self, name: str) -> torch.Tensor:
        came = self.came.get(name)
        if isinstance(came, Patch):
            return came.made()
        return self.served[name] if came is None else came

    def __iter__(self) -> Iterator[str]:
        return iter(self.served)

    def __len__(self) -> int:
        return len(self.served)

    def kept(self) -> dict[str, torch.Tensor]:
        """Write each `Patch` of the update into its served tensor in place. Return all tensors of
        the new version by name; a served tensor that is not in the update is unchanged.
        """
        for came in self.came.values():
            if isinstance(came, Patch):
                came.write()
        return {
            name: came.tensor if isinstance(came, Patch) else came
            for name, came in {**self.served, **self.came}.items()
        }


Weights = Mapping[str, torch.Tensor]


@dataclasses.dataclass(eq=False, kw_only=True)
class Inbox:
    """Executes the commands of the `VllmEngine` client in one vLLM worker: it receives updates
    while the model serves, and records the served version. It never changes the model itself.

    Raises:
        ValueError: `bucket` is not a store's URL, or has a secret.

    Example:
        inbox = Inbox(
            rank=0,
            expected=lambda: infos,
            checkpoint=lambda: tensors,
            check_scales=lambda scales: None,
        )
        inbox.answer({"do": "state"})["version"]
    """

    rank: int
    """This worker's rank, from 0."""
    expected: Callable[[], Iterable[TensorInfo]]
    """Returns the tensors of a full update; called once per update."""
    checkpoint: Callable[[], Weights]
    """Returns the tensors that the model was loaded from; called only before the first commit."""
    check_scales: Callable[[Mapping[str, float]], None]
    """Raises an error for `kv_scales` that the model cannot use."""
    bucket: str = ""
    """The URL below which objects may be read, as for `transports.receiver`."""

    def __post_init__(self) -> None:
        if self.bucket:
            refuse_secrets(VARIABLE, self.bucket, "set the secret in the worker's environment")
            place_of(self.bucket)
        self._arrival: IncomingUpdate | None = None
        self._version: int | None = None
        self._committed = ""
        self._served: Weights | None = None
        self._keep = True
        self.torn = ""
        """The reason why layers may mix weights of several versions; empty if they do not."""
        self._half = ""
        self._updating = False
        self._decode_s = 0.0
        # The result of `to_load`: an update and its weights, or None and the weights to restore.
        self._loaded: tuple[WeightUpdate | None, Weights] | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Execute one command of the `VllmEngine` client. Return the worker's state after the
        command; if the command failed, the error is under "error".

        Commands: "state"; "open" with update, opened, serving, keep, silence_s; "bucket",
        "complete" and "drop" with an id. All return at once, because a thread receives the buckets.
        """
        try:
            self._do(command["do"], command)
        except Exception as error:  # noqa: BLE001 (the client raises it)
            return {**self._state(), "error": described(error)}
        return self._state()

    def to_load(self, update_id: str, *, restore: bool) -> Weights:
        """Return the weights that the worker must load into the model: those of the staged update,
        or with `restore` those from before the commit that failed.

        Raises:
            UpdateRefused: the update is not staged, or there is no copy of the previous weights.
        """
        arrival = None if restore else self._arrival
        weights = None if arrival is None or arrival.update.id != update_id else arrival.tensors
        if arrival is not None and weights is not None:
            self._half = update_id
            if arrival.update.base_version is not None:
                # Reloading a layer needs all of its tensors, including fused ones.
                weights = Patched(self._base(), weights)
            self._loaded = (arrival.update, weights)
        elif restore or update_id == self._committed:  # committed here, and failed elsewhere
            self._loaded = (None, self._base())
        else:
            raise UpdateRefused(f"update {update_id} is not staged here; stage it first")
        return self._loaded[1]

    @property
    def dirty(self) -> str:
        """The reason why the model's weights may mix several versions; empty if they do not."""
        return self.torn or ("a commit is under way" if self._updating else "")

    @property
    def loaded_scales(self) -> Mapping[str, float] | None:
        """The `kv_scales` of the update that is being loaded; None if the update has none, or if no
        update is being loaded.
        """
        update = self._loaded[0] if self._loaded is not None else None
        return update.kv_scales if update is not None else None

    def began(self) -> None:
        """Record that the worker begins to reload the model's layers. The worker must not serve
        until `finished` is called.
        """
        if self._updating:
            self.torn = self.torn or "a commit was begun, and neither ended nor failed"
        self._loaded, self._updating = None, True

    def failed(self, error: BaseException) -> None:
        """Record that loading an update failed midway: the layers work, but mix weights of two
        versions.
        """
        self._loaded, self._updating = None, False
        self.torn = f"a commit failed half-way: {error}"

    def finished(self) -> None:
        """Record that vLLM has reassembled the model's layers at the end of an update, and set the
        served version to that of the loaded update.

        The served version is then that of the weights that `to_load` returned. It is unchanged if
        `to_load` was not called, or loading failed.
        """
        self._updating = False
        if self._loaded is None:
            return
        (update, weights), self._loaded = self._loaded, None
        self.torn = self._half = ""
        if update is not None:
            self._version, self._committed = update.version, update.id
            # The model has the update now, so the served copy may be patched.
            tensors = weights.kept() if isinstance(weights, Patched) else weights
            self._served = tensors if self._keep else None
            self._arrival = None

    def forget(self) -> None:
        """Drop the update that is staged or arriving. If there is none: no-op."""
        if self._arrival is not None:
            self._arrival.drop()
            self._arrival = None

    def _state(self) -> dict[str, Any]:
        arrival = self._arrival
        holds = {} if self._version is None else {self._committed: self._version}
        if arrival is not None and arrival.tensors is not None:
            holds[arrival.update.id] = arrival.update.version
        return {
            "version": self._version,
            "committed": self._committed,
            "holds": holds,
            "staging": arrival.update.id if arrival is not None and arrival.busy else "",
            "received": arrival.received if arrival is not None else 0,
            "failed": described(arrival.error) if arrival is not None and arrival.error else None,
            "dirty": self.dirty,
            "half": self._half,
            "updating": self._updating,
            "decode_s": self._decode_s,
        }

    def _base(self) -> Weights:
        if self._served is not None:
            return self._served
        if self._version is None:
            return self.checkpoint()
        raise UpdateRefused(
            f"version {self._version} is served and no copy of it is kept; construct the engine "
            "with keep_copy=True, or send every tensor"
        )

    def _do(self, action: str, command: Mapping[str, Any]) -> None:
        arrival = self._arrival
        if action == "open":
            self._open(WeightUpdate(**command["update"]), command)
        elif action in ("bucket", "complete", "drop"):
            if arrival is None or arrival.update.id != command["id"]:
                if action == "drop":
                    return  # an unknown id
                staging = "none" if arrival is None else arrival.update.id
                raise UpdateRefused(
                    f"update {command['id']} is not being staged, {staging} is; stage it again"
                )
            if action == "bucket":
                arrival.announce(command["announced"])
            elif action == "complete":
                arrival.complete(int(command["buckets"]))
                self._decode_s = arrival.decode_s
            else:
                self.forget()
        elif action != "state":
            raise ValueError(
                f"a worker got command {action!r}; allowed: state, open, bucket, complete, drop"
            )

    def _open(self, update: WeightUpdate, command: Mapping[str, Any]) -> None:
        serving = command["serving"] if self._version is None else self._version
        refuse_out_of_turn(
            f"worker {self.rank}",
            update,
            least=serving + 1,
            serving=None if self.dirty else serving,
            staging=self._state()["staging"],
        )
        base = None if update.base_version is None else self._base()
        if update.kv_scales is not None:
            self.check_scales(update.kv_scales)
        self._keep = bool(command["keep"])
        infos = tuple(self.expected())
        # The trainer has rank 0.
        connect = functools.partial(
            receiver, command["opened"], rank=self.rank + 1, expected=infos, bucket=self.bucket
        )
        served = None if base is None else base.__getitem__
        staging = Staging(update, expected=infos, served=served)
        silence_s = float(command["silence_s"])
        self._arrival = IncomingUpdate(staging, connect, silence_s=silence_s)


def described(error: BaseException) -> dict[str, str]:
    """Return an error as a dictionary of its type's name and its message, which the client's
    `WorkersState.of` reads.
    """
    return {"kind": type(error).__name__, "message": str(error) or repr(error)}


class NotInPlace(Exception):
    """An update cannot be written into the model's parameters in place, because they do not hold
    the elements as a checkpoint has them; the message says why.
    """


class Places:
    """Maps each element of a checkpoint to its position in a vLLM model's parameters, so that
    updates can be written in place.

    The model's loader runs once with meta tensors, and its copies are recorded instead of made, so
    this needs no table of the tensors that it fuses, shards or transposes.

    Example: `Places(model, served).write(update)`.
    """

    def __init__(self, model: Any, served: Mapping[str, torch.Tensor]) -> None:
        """Run the model's loader with meta tensors, and record into which part of which parameter
        the loader would copy each tensor. Raise `NotInPlace` if the loader does more than copy.

        Args:
            model: a model with a `load_weights` method, as vLLM's have.
            served: every tensor that the model has, by its name in a checkpoint.

        Raises:
            NotInPlace: the loader does more than copy elements, or the model's parameters do not
                have the bits of `served` at those positions.
        """
        probes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in served.items()
        }
        names = {_storage(probe): name for name, probe in probes.items()}
        recorder = _CopyRecorder(
            _storage(tensor) for tensor in (*model.parameters(), *model.buffers())
        )
        try:
            with torch.no_grad(), recorder:
                model.load_weights(iter(probes.items()))
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            # The meta tensors have no elements, and a packed layer may have no weight.
            raise NotInPlace(f"its loader wants more than to copy: {error}") from error
        self._copies: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for to, probe in recorder.copies:
            name = names.get(_storage(probe), "")
            if not name or (to.dtype, to.shape) != (probe.dtype, probe.shape):
                raise NotInPlace(f"{name or 'a tensor'} is converted as it is loaded")
            if not torch.equal(_bits(to), _bits(_part(served[name], probe).to(to.device))):
                raise NotInPlace(f"{name} is in another layout after it is loaded")
            self._copies.setdefault(name, []).append((to, probe))

    @torch.no_grad()
    def write(self, update: Patched) -> None:
        """Write an update into the model's parameters in place. The model must have the weights
        that the update builds on.
        """
        for name, came in update.came.items():
            for to, probe in self._copies.get(name, ()):
                if isinstance(came, Patch):
                    inside_K, at_K = _moved(came.at_K, probe, to)
                    flat = to.as_strided((to.untyped_storage().nbytes() // to.itemsize,), (1,), 0)
                    Patch(flat, at_K[inside_K], came.new_K[inside_K]).write()
                else:
                    to.copy_(_part(came, probe))


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that records copies into the given storages instead of making the
    copies. Fills of these storages with a constant are skipped, and any other write into them
    raises `NotInPlace`.
    """

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._storages = set(storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = func._schema.is_mutable and _storage(args[0]) in self._storages
        if not written:
            return func(*args, **(kwargs or {}))
        # By name: cloudpickle takes `torch.ops` for a module, and cannot pickle it.
        if str(func) == "aten.copy_.default":
            self.copies.append((args[0], args[1]))
        elif str(func.overloadpacket) not in ("aten.fill_", "aten.zero_"):  # padding
            raise NotInPlace(f"its loader writes by {func}")
        return args[0]


def _storage(tensor: torch.Tensor) -> int:
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _part(tensor: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """Return the view of `tensor` with the offset, shape and strides that `probe` has in a meta
    tensor, which is contiguous and has the shape of `tensor`.
    """
    contiguous = tensor.contiguous()
    start = contiguous.storage_offset() + probe.storage_offset()
    return contiguous.as_strided(probe.shape, probe.stride(), start)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _moved(at_K: Any, probe: torch.Tensor, to: torch.Tensor) -> tuple[Any, Any]:
    """Map flat indices of a checkpoint's tensor, [K], to flat indices in the storage of the
    parameter `to`. The loader copies only the view `probe` of that tensor into `to`, so some
    indices may have no place there.

    Returns:
        bool [K], True for indices that the probe covers; and their indices in `to`, int64 [K].
    """
    rest_K = at_K - probe.storage_offset()
    inside_K, moved_K = rest_K >= 0, to.storage_offset()
    dims = sorted(zip(probe.stride(), probe.shape, to.stride(), strict=True), reverse=True)
    for stride, size, target_stride in dims:
        if size > 1:
            index_K, rest_K = rest_K // stride, rest_K % stride
            inside_K = inside_K & (index_K < size)
            moved_K = moved_K + index_K * target_stride
    return inside_K & (rest_K == 0), moved_K


LayerScales = Mapping[str, float]
"""The scales of one layer, under "k", "v" and "q"."""


class CacheScales:
    """Reads, checks and writes the scales of one model's key-value caches in FP8.

    vLLM keeps a scale as a buffer of each attention layer, and also as a number for backends that
    read that. A model with a quantised checkpoint has parameters for the scales while it loads;
    any other model resets them to 1 at every reload. So for both, `write` runs after the reload.

    Example: `scales = CacheScales(model); scales.check(new); scales.write(scales.read(), new)`.
    """

    def __init__(
        self, model: torch.nn.Module, *, whole: bool = True, doubled: bool = False
    ) -> None:
        """Find the model's layers that have a key-value cache in FP8 with a scale per tensor.

        Args:
            model: vLLM's model.
            whole: True if the model has all layers. False for a pipeline stage, which ignores the
                names of other layers.
            doubled: True to double all scales, as FP8 on some AMD GPUs requires.
        """
        self._layers = {name: layer for name, layer in model.named_modules() if _has_scales(layer)}
        self._whole = whole
        self._factor = 2.0 if doubled else 1.0

    def check(self, kv_scales: Mapping[str, float]) -> None:
        """Raise an error unless layers of the model have FP8 caches, and `kv_scales` has the scales
        of keys and values for each of them. A name of no such layer is an error if the model has
        all layers; a pipeline stage ignores it.

        Raises:
            EngineUnsupported: no layer has a cache in FP8 with a scale per tensor.
            UpdateMismatch: a name belongs to no layer, or a layer lacks the scale of its keys or
                values.
        """
        if not self._layers:
            raise EngineUnsupported(
                f"{len(kv_scales)} kv_scales came, and no layer here has a key-value cache in FP8 "
                "with a scale per tensor; start vLLM with --kv-cache-dtype fp8, or leave "
                "kv_scales out"
            )
        scales_of, unknown = self._by_layer(kv_scales)
        missing = [
            f"{layer}.{which}_scale"
            for layer in self._layers
            for which in ("k", "v")
            if which not in scales_of.get(layer, {})
        ]
        if unknown and self._whole:
            raise UpdateMismatch(
                f"kv_scales name no layer of the model: {listed(unknown, ', ')}; it has "
                f"{listed(list(self._layers), ', ')}"
            )
        if missing:
            raise UpdateMismatch(
                f"kv_scales lack {listed(missing, ', ')}; give those of all layers"
            )

    def read(self) -> dict[str, LayerScales]:
        """Return the current scales of each layer's key-value cache, by the layer's name."""
        return {
            name: {which: float(getattr(layer, f"_{which}_scale")) for which in ("k", "v", "q")}
            for name, layer in self._layers.items()
        }

    def write(
        self, previous: Mapping[str, LayerScales], kv_scales: Mapping[str, float] | None
    ) -> None:
        """Set the scales of each layer's cache to those in `kv_scales`, or where that has none, to
        those in `previous`, which `read` returned before the model was reloaded.
        """
        new = self._by_layer(kv_scales or {})[0]
        for name, layer in self._layers.items():
            updated = {which: value * self._factor for which, value in new.get(name, {}).items()}
            for which, value in {**previous.get(name, {}), **updated}.items():
                _set(layer, which, value)
            if updated:
                layer.calculate_kv_scales = False  # else the next forward would overwrite them

    def _by_layer(
        self, kv_scales: Mapping[str, float]
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        scales_of: dict[str, dict[str, float]] = {}
        unknown = []
        for name, value in kv_scales.items():
            prefix, _, suffix = name.rpartition(".")
            tried = (prefix, f"{prefix}.attn", f"{prefix}.mla_attn.mla_attn")
            layer = next((candidate for candidate in tried if candidate in self._layers), None)
            if layer is None:
                unknown.append(name)
            else:
                scales_of.setdefault(layer, {})[suffix[0]] = value
        return scales_of, unknown


def _has_scales(layer: Any) -> bool:
    dtype = str(getattr(layer, "kv_cache_dtype", ""))
    # Scales per token and head are computed when keys are cached.
    return dtype.startswith("fp8") and "per_token" not in dtype and hasattr(layer, "_k_scale")


def _set(layer: Any, which: str, value: float) -> None:
    # In place: captured CUDA graphs read this memory.
    buffer = getattr(layer, f"_{which}_scale")
    buffer.fill_(value)
    setattr(layer, f"_{which}_scale_float", buffer.item())  # as float32 rounds it
    on_host = getattr(layer, f"_{which}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(value)
