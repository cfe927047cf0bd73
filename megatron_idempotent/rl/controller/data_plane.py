"""Stores complete groups until they are trained: in this process, or in TransferQueue on Ray."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.protocol import Sample
from megatron_idempotent.rl.workers.ray import connected_ray

from .protocol import RolloutGroup


class MemoryPlane:
    """Implements `protocol.DataPlane` with a dictionary in this process; groups are not copied,
    because they are frozen.

    Example: `await plane.put(group); await plane.get(group.id)`.
    """

    def __init__(self) -> None:
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        """Return the number of stored groups."""
        return len(self._groups)

    def __bool__(self) -> bool:
        # Else an empty plane would be false, and `plane or other` would drop it.
        return True

    async def put(self, group: RolloutGroup) -> None:
        """Store a group in memory, replacing a group of the same id."""
        self._groups[group.id] = group

    async def get(self, group_id: int) -> RolloutGroup:
        """Return the stored group with this id; raise `KeyError` if no such group is stored.

        Raises:
            KeyError: the group was never put, or was cleared.
        """
        try:
            return self._groups[group_id]
        except KeyError:
            raise KeyError(
                f"group {group_id} is not in the data plane: never put, or cleared"
            ) from None

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Remove the groups with these ids; unknown ids are ignored."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    async def close(self) -> None:
        """Remove all stored groups."""
        self._groups.clear()


FIELDS = ("tokens", "logprobs", "versions", "lengths", "rewards", "rest")
"""The columns of a group's row in TransferQueue, each a vector.

`tokens` (int64), `logprobs` (float64) and `versions` (int64) have a value per token, with all
samples concatenated; `lengths` (int64) and `rewards` (float64) have a value per sample; `rest`
(uint8) is a pickle of the other fields. Other clients of the queue can read the first five."""


class TransferQueuePlane:
    """Implements `protocol.DataPlane` with TransferQueue 0.1.11 or later: stores groups in one
    partition of the queue, under their ids.

    The first use starts TransferQueue on the connected Ray cluster unless it already runs there;
    `transfer_queue.close()` ends it. Prompts are pickled.

    Example:
        ray.init(address="auto")
        plane = TransferQueuePlane(partition="run-7")
        await plane.put(group)
    """

    def __init__(
        self, *, partition: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the settings; the first use connects to TransferQueue.

        Args:
            partition: the partition's name, which no other plane may use; None for a new one. With
                the name of a killed run, its groups are accessible.
            settings: the argument of TransferQueue's `init`, such as
                `{"backend": {"SimpleStorage": {"num_data_storage_units": 8}}}`.
        """
        self._partition = partition or f"megatron-idempotent-{uuid.uuid4().hex}"
        self._settings = dict(settings or {})
        self._queue: Any = None
        self._connecting = asyncio.Lock()

    @property
    def partition(self) -> str:
        """The name of the TransferQueue partition in which this object stores groups."""
        return self._partition

    async def put(self, group: RolloutGroup) -> None:
        """Store a group in the TransferQueue partition, replacing a group of the same id.

        Raises:
            ModuleNotFoundError: TransferQueue is not installed.
            RuntimeError: there is no Ray cluster, or the queue failed to store the group; put it
                again.
        """
        queue = await self._connected()
        await queue.async_kv_batch_put(
            keys=[str(group.id)],
            partition_id=self._partition,
            fields=_fields(group),
            tags=[{"version": group.oldest_version, "tokens": group.tokens}],
        )

    async def get(self, group_id: int) -> RolloutGroup:
        """Return the group with this id from the TransferQueue partition; raise `KeyError` if no
        such group is stored there.

        Raises:
            KeyError: the group was cleared, or its `put` did not complete.
            RuntimeError: the queue does not respond.
        """
        queue = await self._connected()
        try:
            row = await queue.async_kv_batch_get(
                keys=[str(group_id)], partition_id=self._partition, select_fields=list(FIELDS)
            )
            columns = {name: row[name][0] for name in FIELDS}
        except (ValueError, KeyError) as error:  # for unknown keys and missing fields
            raise KeyError(
                f"group {group_id} is not in partition {self._partition}: {error}"
            ) from error
        return _group(columns)

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Remove the groups with these ids from the partition; unknown ids are ignored.

        Raises:
            RuntimeError: the queue failed to remove them; clear them again.
        """
        keys = [str(group_id) for group_id in dict.fromkeys(group_ids)]
        if keys:
            queue = await self._connected()
            await queue.async_kv_clear(keys=keys, partition_id=self._partition)

    async def close(self) -> None:
        """Remove all groups of this plane's partition. TransferQueue itself keeps running."""
        queue, self._queue = self._queue, None
        if queue is not None:
            listed = await queue.async_kv_list(partition_id=self._partition)
            keys = list(listed.get(self._partition, ()))
            if keys:
                await queue.async_kv_clear(keys=keys, partition_id=self._partition)

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._queue is None:
                # In a thread: it starts actors and waits for them.
                self._queue = await asyncio.to_thread(connect, self._settings)
        return self._queue


def connect(settings: Mapping[str, Any] | None = None) -> Any:
    """Start TransferQueue on the Ray cluster, or connect to the one that runs there; return the
    `transfer_queue` module.

    Blocks until TransferQueue has started. `settings` is the argument of TransferQueue's `init`.

    Raises:
        ModuleNotFoundError: TransferQueue is not installed.
        RuntimeError: there is no Ray cluster.
    """
    import torch

    # By default the queue changes torch's number of threads during every put and get, and so the
    # order of sums in all that this process computes meanwhile.
    threads_before = os.environ.get("TQ_NUM_THREADS")
    os.environ.setdefault("TQ_NUM_THREADS", str(torch.get_num_threads()))
    try:
        queue = importlib.import_module("transfer_queue")
    except ModuleNotFoundError as error:
        if error.name not in ("transfer_queue", "ray"):
            raise
        raise ModuleNotFoundError(
            "TransferQueue is not installed; install megatron-idempotent[transferqueue], here and "
            "on every node of the cluster",
            name=error.name,
        ) from error
    finally:
        if threads_before is None:
            del os.environ["TQ_NUM_THREADS"]
    connected_ray("TransferQueuePlane")
    omegaconf = importlib.import_module("omegaconf")
    queue.init(omegaconf.OmegaConf.create(dict(settings)) if settings else None)
    return queue


def _fields(group: RolloutGroup) -> Any:
    import torch

    tensordict = importlib.import_module("tensordict")
    samples = group.samples
    attributes = {
        "id": group.id,
        "prompt": group.prompt,
        "failed": group.failed,
        "ids": [sample.request_id for sample in samples],
        "reasons": [sample.finish_reason for sample in samples],
        "routes": [sample.routed_experts for sample in samples],
    }
    columns = {
        "tokens": ([token for sample in samples for token in sample.tokens], torch.int64),
        "logprobs": ([value for sample in samples for value in sample.logprobs], torch.float64),
        "versions": ([version for sample in samples for version in sample.versions], torch.int64),
        "lengths": ([len(sample.tokens) for sample in samples], torch.int64),
        "rewards": (group.rewards, torch.float64),
    }
    rows = {name: torch.tensor([column], dtype=kind) for name, (column, kind) in columns.items()}
    rows["rest"] = torch.frombuffer(bytearray(pickle.dumps(attributes)), dtype=torch.uint8)[None]
    return tensordict.TensorDict(rows, batch_size=[1])


def _group(row: Mapping[str, Any]) -> RolloutGroup:
    attributes = pickle.loads(row["rest"].contiguous().numpy().tobytes())
    tokens, logprobs, versions, lengths, rewards = (row[name].tolist() for name in FIELDS[:5])
    samples = []
    fields = zip(
        attributes["ids"], attributes["reasons"], attributes["routes"], lengths, strict=True
    )
    for request_id, reason, routes, length in fields:
        samples.append(
            Sample(
                request_id=request_id,
                tokens=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                versions=tuple(versions[:length]),
                finish_reason=reason,
                routed_experts=routes,
            )
        )
        del tokens[:length], logprobs[:length], versions[:length]
    return RolloutGroup(
        id=attributes["id"],
        prompt=attributes["prompt"],
        samples=tuple(samples),
        rewards=tuple(rewards),
        failed=attributes["failed"],
    )
