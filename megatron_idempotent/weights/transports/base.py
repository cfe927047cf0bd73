"""The two ends of a transport: how buckets get from a trainer to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_idempotent.weights.records import Bucket, WeightUpdate

Announcement = Mapping[str, Any]
"""JSON that the engine's controller passes on, so that its workers find the bytes."""


class Sender(Protocol):
    """The trainer's end, one for each engine.

    opened = await sender.open(update)            # pass it to the engine's workers
    for bucket in buckets:
        announced = await sender.announce(bucket)
        # pass it to the workers, and at the same time:
        await sender.transmit(bucket)
    await sender.close()
    """

    async def open(self, update: WeightUpdate) -> Announcement:
        """Begin an update; returns what `receiver()` needs, its "kind" among it."""
        ...

    async def announce(self, bucket: Bucket) -> Announcement:
        """Put a bucket where workers find it, or say that it comes; returns its metadata."""
        ...

    async def transmit(self, bucket: Bucket) -> None:
        """Send the bucket's bytes where that takes both ends at once; elsewhere a no-op."""
        ...

    async def release(self, bucket: Bucket) -> None:
        """All workers have the bucket: free what it held."""
        ...

    async def close(self) -> None:
        """End the update, complete or not, and leave no bytes. Twice: no-op."""
        ...


class Receiver(Protocol):
    """A worker's end. Its methods block: call them in a thread, beside the model."""

    def receive(self, announced: Announcement) -> Bucket:
        """The bucket, in memory of this process: CPU tensors, or the GPU's for a CUDA transport.

        Errors: `UpdateDamaged` for a bucket that is incomplete, or did not come in time.
        """
        ...

    def close(self) -> None:
        """Leave what `open` announced. Twice: no-op."""
        ...
