"""Receives updates in a worker, and keeps track of what is staged there and what it serves."""

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
    UpdateRefused,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.transports import receiver


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
    ) -> None:
        """
        Args:
            update: the update that is received.
            opened: the announcement that the trainer's sender returned from `open`.
            rank: this worker's rank, from 0.
            expected: every tensor of the model, by its Hugging Face name.
            silence_s: seconds without an announced bucket after which the update is given up.
        """
        self.update = update
        self.received = 0
        self.error: Exception | None = None
        self.tensors: Mapping[str, torch.Tensor] | None = None
        self._staging: Staging | None = Staging(update, expected=expected)
        self._announced: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._dropped = False
        self._silence_s = silence_s
        # The model's: a thread that nobody tells of it has the first one.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpu = torch.cuda.current_device() if started else None
        self._thread = threading.Thread(
            target=self._run, args=(dict(opened), rank), name=f"stage {update.id}", daemon=True
        )
        self._thread.start()

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
        try:
            self.tensors = self._staging.complete()
        except UpdateDamaged as error:
            self._fail(error)
            raise
        finally:
            self._announced.put(None)

    def drop(self) -> None:
        """Forget all tensors; the thread ends after the bucket that it is receiving."""
        self._dropped = True
        self._fail(UpdateDamaged(f"update {self.update.id} was dropped"))
        self._announced.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; it is a daemon, so a sender that is stuck holds nothing up."""
        self._thread.join(timeout_s)

    def _fail(self, error: Exception) -> None:
        self.error, self.tensors, self._staging = error, None, None

    def _run(self, opened: Mapping[str, Any], rank: int) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            inbound = receiver(opened, rank=rank + 1)  # the trainer is 0
            try:
                while (announced := self._announced.get(timeout=self._silence_s)) is not None:
                    bucket = inbound.receive(announced)
                    staging = self._staging
                    if self._dropped or staging is None:
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
            if not self._dropped:
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
    ) -> None:
        """
        Args:
            rank: this worker's rank, from 0.
            expected: every tensor of the model as an update brings it; called once per update.
            checkpoint: the tensors that the model was loaded from; called only as long as nothing
                was committed.
            check_scales: raises for an update's `kv_scales` that the model cannot take.
        """
        self._rank = rank
        self._expected = expected
        self._checkpoint = checkpoint
        self._check_scales = check_scales
        self._arrival: IncomingUpdate | None = None
        self._version: int | None = None
        self._committed = ""
        self._served: Weights | None = None
        self._keep = True
        self._dirty = ""
        self._dirty_before = ""
        self._half = ""
        self._updating = False
        self._restored = False
        self._loaded: tuple[WeightUpdate, Weights] | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the command says; return the state after it, or the error as "error".

        Commands: "state"; "open" with update, opened, serving, keep, silence_s; "bucket" and
        "complete" and "drop" with an id. They return at once: receiving is a thread's work.
        """
        try:
            getattr(self, f"_do_{command['do']}")(command)
        except Exception as error:  # noqa: BLE001 (it is raised where the command came from)
            return {**self._state(), "error": _described(error)}
        return self._state()

    def to_load(self, update_id: str, *, restore: bool) -> Weights:
        """Return the weights that a commit, or a rollback, is to load. Errors: `UpdateRefused`."""
        if restore:
            self._restored, base = True, self._base()
            return base
        arrival = self._arrival
        if arrival is not None and arrival.update.id == update_id and arrival.tensors is not None:
            self._half, weights = update_id, arrival.tensors
            if arrival.update.base_version is not None:
                # Layers are loaded whole: projections that come fused need all of their parts.
                weights = {**self._base(), **weights}
            self._loaded = (arrival.update, weights)
            return weights
        if update_id == self._committed:  # here it was, and in another worker it failed
            self._restored, base = True, self._base()
            return base
        raise UpdateRefused(f"update {update_id} is not staged here; stage it first")

    @property
    def dirty(self) -> str:
        """The reason why weights may be of more than one version; empty if they are of one."""
        return self._dirty

    @property
    def loaded_scales(self) -> Mapping[str, float] | None:
        """The `kv_scales` of the update that `to_load` gave, until `finished`; None without any."""
        return self._loaded[0].kv_scales if self._loaded is not None else None

    def began(self) -> None:
        """Note that the layers are being taken apart: until `finished` it must not serve."""
        self._loaded, self._restored = None, False
        self._updating = True
        self._dirty_before = self._dirty
        self._dirty = self._dirty or "a commit is under way"

    def failed(self, error: BaseException) -> None:
        """Note that loading stopped half-way: the layers are put together, their weights torn."""
        self._loaded, self._restored = None, False
        self._updating = False
        self._dirty = self._dirty_before = f"a commit failed half-way: {error}"

    def finished(self) -> None:
        """Note that the model is whole, with what `to_load` gave or, without that, what it had."""
        self._updating = False
        self._dirty = "" if self._restored or self._loaded else self._dirty_before
        self._half = self._half if self._dirty else ""
        if self._loaded is None:
            return
        update, weights = self._loaded
        self._version, self._committed, self._loaded = update.version, update.id, None
        self._served = weights if self._keep else None
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
            "dirty": self._dirty,
            "half": self._half,
            "updating": self._updating,
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

    def _do_state(self, command: Mapping[str, Any]) -> None:
        pass

    def _do_open(self, command: Mapping[str, Any]) -> None:
        update = WeightUpdate(**command["update"])
        serving = command["serving"] if self._version is None else self._version
        if self._arrival is not None and self._arrival.busy:
            raise UpdateRefused(
                f"update {self._arrival.update.id} is being staged; send {update.id} when that one "
                "is staged, or rolled back"
            )
        if update.version <= serving:
            raise UpdateRefused(
                f"update {update.id} is version {update.version}, and {serving} is served; send "
                "one above it"
            )
        if update.base_version is not None:
            if update.base_version != serving or self._dirty:
                raise UpdateRefused(
                    f"update {update.id} builds on version {update.base_version}, and "
                    f"{'weights of more than one' if self._dirty else serving} are served; send "
                    "every tensor"
                )
            self._base()
        if update.kv_scales is not None:
            self._check_scales(update.kv_scales)
        self._keep = bool(command["keep"])
        self._arrival = IncomingUpdate(
            update,
            command["opened"],
            rank=self._rank,
            expected=self._expected(),
            silence_s=float(command["silence_s"]),
        )

    def _opened(self, command: Mapping[str, Any]) -> IncomingUpdate:
        if self._arrival is None or self._arrival.update.id != command["id"]:
            found = "none" if self._arrival is None else self._arrival.update.id
            raise UpdateRefused(
                f"update {command['id']} is not being staged, {found} is; stage it again"
            )
        return self._arrival

    def _do_bucket(self, command: Mapping[str, Any]) -> None:
        self._opened(command).announce(command["announced"])

    def _do_complete(self, command: Mapping[str, Any]) -> None:
        self._opened(command).complete(int(command["buckets"]))

    def _do_drop(self, command: Mapping[str, Any]) -> None:
        """Drop an update; an unknown id is a no-op."""
        if self._arrival is not None and self._arrival.update.id == command["id"]:
            self.forget()


def _described(error: BaseException) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error) or repr(error)}
