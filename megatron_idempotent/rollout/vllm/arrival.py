"""One update on its way into a worker, received by a thread beside the model that serves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_idempotent.weights import Staging, TensorInfo, UpdateDamaged, WeightUpdate
from megatron_idempotent.weights.transports import receiver


class Arrival:
    """Receives and checks buckets as they are announced; nothing of it touches the model.

    Example:
        arrival = Arrival(update, opened, rank=0, expected=infos, silence_s=60.0)
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
            opened: what the trainer's sender returned from `open`.
            rank: of this worker, from 0.
            expected: every tensor of the model, by its Hugging Face name.
            silence_s: seconds without a bucket announced, after which it is given up.
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
        """True while more is to come: neither complete nor failed."""
        return self.tensors is None and self.error is None

    def announce(self, announced: Mapping[str, Any]) -> None:
        """A bucket that comes, or is there; returns at once."""
        self._announced.put(announced)

    def complete(self, buckets: int) -> None:
        """All buckets were announced and have been received. Errors: `UpdateDamaged` if not."""
        if self.error is not None:
            raise self.error
        if self._staging is None or self.received != buckets:
            raise UpdateDamaged(
                f"update {self.update.id}: {self.received} of {buckets} buckets came; send the "
                "update again"
            )
        try:
            self.tensors = self._staging.complete()
        except UpdateDamaged as error:
            self._fail(error)
            raise
        finally:
            self._announced.put(None)

    def drop(self) -> None:
        """Forget everything. Its thread ends after the bucket that it is receiving."""
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
                    f"update {self.update.id}: no bucket in {self._silence_s:g} s behind "
                    f"{self.received}; is the trainer still there? Send the update again"
                )
            )
        except Exception as error:  # noqa: BLE001 (the client raises it, whatever it is)
            if not self._dropped:
                self._fail(error)
