"""Receives updates in a worker, keeps track of what it serves, and writes scales of its cache.

Nothing here needs vLLM: `vllm_worker` has what does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_idempotent.rl.weights import (
    Staging,
    TensorInfo,
    UpdateDamaged,
    UpdateMismatch,
    UpdateRefused,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.records import listed
from megatron_idempotent.rl.weights.transports import receiver
from megatron_idempotent.rl.weights.transports.bucket import VARIABLE
from megatron_idempotent.rl.weights.urls import place_of, refuse_secrets

from .protocol import EngineUnsupported, refuse_out_of_turn
from .vllm_in_place import Patched


class IncomingUpdate:
    """Receives and checks buckets as they are announced; it does not touch the model.

    Example:
        arrival = IncomingUpdate(update, opened, rank=0, expected=infos, silence_s=60.0)
        arrival.announce(announced)
        arrival.received                # counts up
        arrival.complete(buckets=1)     # the tensors are there, whole
    """

    def __init__(
        self,
        update: WeightUpdate,
        opened: Mapping[str, Any],
        *,
        rank: int,
        expected: Iterable[TensorInfo],
        silence_s: float,
        served: Callable[[str], torch.Tensor] | None = None,
        bucket: str = "",
    ) -> None:
        """
        Args:
            update: the update that is received.
            opened: the announcement that the trainer's sender returned from `open`.
            rank: this worker's rank, from 0.
            expected: every tensor of the model, by its Hugging Face name.
            silence_s: seconds without an announced bucket after which the update is given up.
            served: returns a tensor as it is served; None for a worker that keeps no copy.
            bucket: the URL at or below which objects are read, as for `transports.receiver`.
        """
        self.update = update
        self.received, self.decode_s = 0, 0.0
        self.error: Exception | None = None
        self.tensors: Mapping[str, Any] | None = None
        infos = tuple(expected)
        self._staging: Staging | None = Staging(update, expected=infos, served=served)
        limits = {"rank": rank + 1, "expected": infos, "bucket": bucket}  # the trainer is 0
        self._announced: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._silence_s = silence_s
        # The model's: a thread that nobody tells of it has the first one.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpu = torch.cuda.current_device() if started else None
        # A daemon: a sender that is stuck holds nothing up.
        threading.Thread(
            target=self._run, args=(opened, limits), name=f"stage {update.id}", daemon=True
        ).start()

    @property
    def busy(self) -> bool:
        """True while the update is neither complete nor failed."""
        return self.tensors is None and self.error is None

    def announce(self, announced: Mapping[str, Any]) -> None:
        """Note a bucket that comes, or is there; return at once."""
        self._announced.put(announced)

    def complete(self, buckets: int) -> None:
        """Check that all buckets were announced and received. Errors: `UpdateDamaged` if not."""
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
        """Forget all tensors; the thread ends after the bucket that it is receiving."""
        self._fail(UpdateDamaged(f"update {self.update.id} was dropped"))
        self._announced.put(None)

    def _fail(self, error: Exception) -> None:
        self.error, self.tensors, self._staging = error, None, None

    def _run(self, opened: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            inbound = receiver(opened, **limits)
            try:
                while (announced := self._announced.get(timeout=self._silence_s)) is not None:
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
                    f"update {self.update.id}: no bucket in {self._silence_s:g} s after "
                    f"{self.received}; is the trainer still there? Send the update again"
                )
            )
        except Exception as error:  # noqa: BLE001 (the client raises it, whatever it is)
            if self.error is None:  # else it was dropped
                self._fail(error)


Weights = Mapping[str, torch.Tensor]


class Inbox:
    """Answers the client's commands while the model serves; the model is changed elsewhere.

    Example:
        inbox = Inbox(
            rank=0,
            expected=lambda: infos,
            checkpoint=lambda: tensors,
            check_scales=lambda scales: None,
        )
        inbox.answer({"do": "state"})["version"]
    """

    def __init__(
        self,
        *,
        rank: int,
        expected: Callable[[], Iterable[TensorInfo]],
        checkpoint: Callable[[], Weights],
        check_scales: Callable[[Mapping[str, float]], None],
        bucket: str = "",
    ) -> None:
        """
        Args:
            rank: this worker's rank, from 0.
            expected: every tensor of the model as an update brings it; called once per update.
            checkpoint: the tensors that the model was loaded from; called only as long as nothing
                was committed.
            check_scales: raises for an update's `kv_scales` that the model cannot take.
            bucket: the URL at or below which objects are read, as for `transports.receiver`.

        Errors: `ValueError` for a `bucket` that is no place of a store, or has a secret.
        """
        self._rank = rank
        self._expected = expected
        self._checkpoint = checkpoint
        self._check_scales = check_scales
        if bucket:
            refuse_secrets(VARIABLE, bucket, "set the secret in the worker's environment")
            place_of(bucket)
        self._bucket = bucket
        self._arrival: IncomingUpdate | None = None
        self._version: int | None = None
        self._committed = ""
        self._served: Weights | None = None
        self._keep = True
        self.torn = ""
        """The reason why layers may have weights of more than one version; empty if none do."""
        self._half = ""
        self._updating = False
        self._decode_s = 0.0
        # What `to_load` gave: weights of an update or, without one, those that were served before.
        self._loaded: tuple[WeightUpdate | None, Weights] | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the command says; return the state after it, or the error as "error".

        Commands: "state"; "open" with update, opened, serving, keep, silence_s; "bucket" and
        "complete" and "drop" with an id. They return at once: receiving is a thread's work.
        """
        try:
            self._do(command["do"], command)
        except Exception as error:  # noqa: BLE001 (it is raised where the command came from)
            return {**self._state(), "error": _described(error)}
        return self._state()

    def to_load(self, update_id: str, *, restore: bool) -> Weights:
        """Return the weights that a commit, or a rollback, is to load. Errors: `UpdateRefused`."""
        arrival = self._arrival
        named = arrival is not None and arrival.update.id == update_id
        weights = arrival.tensors if arrival is not None and named and not restore else None
        if arrival is not None and weights is not None:
            self._half = update_id
            if arrival.update.base_version is not None:
                # A layer that is loaded again needs all of its tensors, fused ones too.
                weights = Patched(self._base(), weights)
            self._loaded = (arrival.update, weights)
            return weights
        if restore or update_id == self._committed:  # here it was, and in another worker it failed
            self._loaded = (None, self._base())
            return self._loaded[1]
        raise UpdateRefused(f"update {update_id} is not staged here; stage it first")

    @property
    def dirty(self) -> str:
        """The reason why weights may be of more than one version; empty if they are of one."""
        return self.torn or ("a commit is under way" if self._updating else "")

    @property
    def loaded_scales(self) -> Mapping[str, float] | None:
        """The `kv_scales` of the update that `to_load` gave, until `finished`; None without any."""
        update = self._loaded[0] if self._loaded is not None else None
        return update.kv_scales if update is not None else None

    def began(self) -> None:
        """Note that the layers are being taken apart: until `finished` it must not serve."""
        if self._updating:
            self.torn = self.torn or "a commit was begun, and neither ended nor failed"
        self._loaded, self._updating = None, True

    def failed(self, error: BaseException) -> None:
        """Note that loading stopped half-way: the layers are put together, their weights torn."""
        self._loaded, self._updating = None, False
        self.torn = f"a commit failed half-way: {error}"

    def finished(self) -> None:
        """Note that the model is whole, with what `to_load` gave or, without that, what it had."""
        self._updating = False
        if self._loaded is None:
            return
        (update, weights), self._loaded = self._loaded, None
        self.torn = self._half = ""
        if update is not None:
            self._version, self._committed = update.version, update.id
            # From here on the model has them, so what is kept may change.
            kept = weights.kept() if isinstance(weights, Patched) else weights
            self._served = kept if self._keep else None
            self._arrival = None

    def forget(self) -> None:
        """Drop the update that is staged or arriving. Without one: no-op."""
        if self._arrival is not None:
            self._arrival.drop()
            self._arrival = None

    def _state(self) -> dict[str, Any]:
        arrival = self._arrival
        holds = {} if self._version is None else {self._committed: self._version}
        if arrival is not None and arrival.tensors is not None:
            holds[arrival.update.id] = arrival.update.version
        return {
            "rank": self._rank,
            "version": self._version,
            "committed": self._committed,
            "holds": holds,
            "staging": arrival.update.id if arrival is not None and arrival.busy else "",
            "received": arrival.received if arrival is not None else 0,
            "failed": _described(arrival.error) if arrival is not None and arrival.error else None,
            "dirty": self.dirty,
            "half": self._half,
            "updating": self._updating,
            "decode_s": self._decode_s,
        }

    def _base(self) -> Weights:
        if self._served is not None:
            return self._served
        if self._version is None:
            return self._checkpoint()
        raise UpdateRefused(
            f"version {self._version} is served and no copy of it is kept; construct the engine "
            "with keep_copy=True, or send every tensor"
        )

    def _do(self, what: str, command: Mapping[str, Any]) -> None:
        arrival = self._arrival
        if what == "open":
            self._open(WeightUpdate(**command["update"]), command)
        elif what in ("bucket", "complete", "drop"):
            if arrival is None or arrival.update.id != command["id"]:
                if what == "drop":
                    return  # an unknown id
                found = "none" if arrival is None else arrival.update.id
                raise UpdateRefused(
                    f"update {command['id']} is not being staged, {found} is; stage it again"
                )
            if what == "bucket":
                arrival.announce(command["announced"])
            elif what == "complete":
                arrival.complete(int(command["buckets"]))
                self._decode_s = arrival.decode_s
            else:
                self.forget()
        elif what != "state":
            raise ValueError(f"a worker was told {what!r}; allowed: state, open, bucket, complete")

    def _open(self, update: WeightUpdate, command: Mapping[str, Any]) -> None:
        serving = command["serving"] if self._version is None else self._version
        arrival = self._arrival
        refuse_out_of_turn(
            f"worker {self._rank}",
            update,
            least=serving + 1,
            serving=None if self.dirty else serving,
            staging=arrival.update.id if arrival is not None and arrival.busy else "",
        )
        base = None if update.base_version is None else self._base()
        if update.kv_scales is not None:
            self._check_scales(update.kv_scales)
        self._keep = bool(command["keep"])
        self._arrival = IncomingUpdate(
            update,
            command["opened"],
            rank=self._rank,
            expected=self._expected(),
            silence_s=float(command["silence_s"]),
            served=None if base is None else base.__getitem__,
            bucket=self._bucket,
        )


def _described(error: BaseException) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error) or repr(error)}


LayerScales = Mapping[str, float]
"""The scales that a layer computes with, by "k", "v" and "q"."""


class CacheScales:
    """Reads, checks and writes the scales of one model's key-value caches in FP8.

    vLLM keeps them as buffers of each attention layer, and as numbers beside them for backends that
    read those. A model whose checkpoint is quantised has parameters for them while it is loaded;
    any other resets them to 1 with every reload. They are written here after that, the same way for
    both.

    Example: `scales = CacheScales(model); scales.check(given); scales.write(scales.read(), given)`.
    """

    def __init__(
        self, model: torch.nn.Module, *, whole: bool = True, doubled: bool = False
    ) -> None:
        """
        Args:
            model: vLLM's model.
            whole: True if it has all layers; a stage of a pipeline ignores names of other layers.
            doubled: True to use scales twice as large, as FP8 on some AMD GPUs needs them.
        """
        self._layers = {name: layer for name, layer in model.named_modules() if _has_scales(layer)}
        self._whole = whole
        self._factor = 2.0 if doubled else 1.0

    def check(self, given: Mapping[str, float]) -> None:
        """Raise an error unless the model can take these scales.

        Errors: `EngineUnsupported` if no cache is in FP8; `UpdateMismatch` for names of no layer,
            and for layers that lack the scale of their keys or values.
        """
        if not self._layers:
            raise EngineUnsupported(
                f"{len(given)} kv_scales came, and no layer here has a key-value cache in FP8 with "
                "a scale per tensor; start vLLM with --kv-cache-dtype fp8, or leave kv_scales out"
            )
        found, unknown = self._by_layer(given)
        missing = [
            f"{layer}.{which}_scale"
            for layer in self._layers
            for which in ("k", "v")
            if which not in found.get(layer, {})
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
        """Return the scales that are in use, by layer."""
        return {
            name: {which: float(getattr(layer, f"_{which}_scale")) for which in ("k", "v", "q")}
            for name, layer in self._layers.items()
        }

    def write(self, before: Mapping[str, LayerScales], given: Mapping[str, float] | None) -> None:
        """Write the scales that were in use before, and those that are given in their place."""
        new = self._by_layer(given or {})[0]
        for name, layer in self._layers.items():
            told = {which: value * self._factor for which, value in new.get(name, {}).items()}
            for which, value in {**before.get(name, {}), **told}.items():
                _set(layer, which, value)
            if told:
                layer.calculate_kv_scales = False  # else the next forward would replace them

    def _by_layer(
        self, given: Mapping[str, float]
    ) -> tuple[dict[str, dict[str, float]], list[str]]:
        found: dict[str, dict[str, float]] = {}
        unknown = []
        for name, value in given.items():
            place, _, suffix = name.rpartition(".")
            tried = (place, f"{place}.attn", f"{place}.mla_attn.mla_attn")
            layer = next((each for each in tried if each in self._layers), None)
            if layer is None:
                unknown.append(name)
            else:
                found.setdefault(layer, {})[suffix[0]] = value
        return found, unknown


def _has_scales(layer: Any) -> bool:
    dtype = str(getattr(layer, "kv_cache_dtype", ""))
    # Per token and head they are computed as keys are cached.
    return dtype.startswith("fp8") and "per_token" not in dtype and hasattr(layer, "_k_scale")


def _set(layer: Any, which: str, value: float) -> None:
    # In place: graphs that were captured read this memory.
    buffer = getattr(layer, f"_{which}_scale")
    buffer.fill_(value)
    setattr(layer, f"_{which}_scale_float", buffer.item())  # as float32 rounds it
    on_host = getattr(layer, f"_{which}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(value)
