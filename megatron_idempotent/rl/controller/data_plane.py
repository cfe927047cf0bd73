"""Keeps complete groups until they are trained: in this process, or in TransferQueue on Ray."""

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
    """Keeps groups in a dictionary; a `protocol.DataPlane`. Groups are frozen, so none is copied.

    Example: `await plane.put(group); await plane.get(group.id)`.
    """

    def __init__(self) -> None:
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        """Return the number of groups that are kept."""
        return len(self._groups)

    def __bool__(self) -> bool:
        # By its length an empty plane would be false, and `plane or other` would not take it.
        return True

    async def put(self, group: RolloutGroup) -> None:
        """Keep a group under its id, in place of one that has the id already."""
        self._groups[group.id] = group

    async def get(self, group_id: int) -> RolloutGroup:
        """Return the group. Errors: `KeyError` if it was never put, or was cleared."""
        try:
            return self._groups[group_id]
        except KeyError:
            raise KeyError(
                f"group {group_id} is not in the data plane: never put, or cleared"
            ) from None

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Forget groups; ids that are not there change nothing."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    async def close(self) -> None:
        """Forget all groups."""
        self._groups.clear()


FIELDS = ("tokens", "logprobs", "versions", "lengths", "rewards", "rest")
"""The columns of a group's row in TransferQueue, each a vector.

`tokens` (int64), `logprobs` (float64) and `versions` (int64) have a value per token, of all samples
one after another; `lengths` (int64) and `rewards` (float64) have one per sample; `rest` (uint8) is
all else, pickled. Other clients of the queue may read the first five."""


class TransferQueuePlane:
    """Keeps groups in a partition of TransferQueue 0.1.11 or later, each under its id.

    TransferQueue is started at the first use, on the Ray cluster that this process is connected to,
    if it does not run there yet; `transfer_queue.close()` ends it. Prompts are pickled.

    Example:
        ray.init(address="auto")
        plane = TransferQueuePlane(partition="run-7")
        await plane.put(group)
    """

    def __init__(
        self, *, partition: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            partition: the name under which groups are kept, which no other plane uses; None makes
                up a new one. The name of a run that was killed gives access to what it has left.
            settings: the argument of TransferQueue's own `init`, such as
                `{"backend": {"SimpleStorage": {"num_data_storage_units": 8}}}`.
        """
        self._partition = partition or f"megatron-idempotent-{uuid.uuid4().hex}"
        self._settings = dict(settings or {})
        self._queue: Any = None
        self._connecting = asyncio.Lock()

    @property
    def partition(self) -> str:
        """The name in TransferQueue under which groups are kept."""
        return self._partition

    async def put(self, group: RolloutGroup) -> None:
        """Keep a group under its id, in place of one that has the id already.

        Errors: `ModuleNotFoundError` without TransferQueue; `RuntimeError` without a Ray cluster,
            or if the queue has not stored it: put it again.
        """
        queue = await self._connected()
        await queue.async_kv_batch_put(
            keys=[str(group.id)],
            partition_id=self._partition,
            fields=_fields(group),
            tags=[{"version": group.oldest_version, "tokens": group.tokens}],
        )

    async def get(self, group_id: int) -> RolloutGroup:
        """Return the group.

        Errors: `KeyError` if it was cleared, or its `put` was not completed; `RuntimeError` if the
            queue does not answer.
        """
        queue = await self._connected()
        try:
            row = await queue.async_kv_batch_get(
                keys=[str(group_id)], partition_id=self._partition, select_fields=list(FIELDS)
            )
            columns = {name: row[name][0] for name in FIELDS}
        except (ValueError, KeyError) as error:  # of unknown keys, and of fields that are absent
            raise KeyError(
                f"group {group_id} is not in partition {self._partition}: {error}"
            ) from error
        return _group(columns)

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Forget groups; ids that are not there change nothing.

        Errors: `RuntimeError` if the queue has not done it: clear them again.
        """
        keys = [str(each) for each in dict.fromkeys(group_ids)]
        if keys:
            queue = await self._connected()
            await queue.async_kv_clear(keys=keys, partition_id=self._partition)

    async def close(self) -> None:
        """Forget all groups of the partition. TransferQueue itself goes on running."""
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
    """Start TransferQueue, or join it where it runs already; return the `transfer_queue` module.

    It blocks until TransferQueue has started. `settings` are those of TransferQueue's own `init`.
    Errors: `ModuleNotFoundError` without TransferQueue, `RuntimeError` without a Ray cluster.
    """
    import torch

    # By itself the queue sets another number of threads in every put and get, for all that this
    # process computes meanwhile, and sums come out in another order.
    chosen = os.environ.get("TQ_NUM_THREADS")
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
        if chosen is None:
            del os.environ["TQ_NUM_THREADS"]
    connected_ray("TransferQueuePlane")
    omegaconf = importlib.import_module("omegaconf")
    queue.init(omegaconf.OmegaConf.create(dict(settings)) if settings else None)
    return queue


def _fields(group: RolloutGroup) -> Any:
    import torch

    tensordict = importlib.import_module("tensordict")
    samples = group.samples
    rest = {
        "id": group.id,
        "prompt": group.prompt,
        "failed": group.failed,
        "ids": [each.request_id for each in samples],
        "reasons": [each.finish_reason for each in samples],
        "routes": [each.routed_experts for each in samples],
    }
    columns = {
        "tokens": ([token for each in samples for token in each.tokens], torch.int64),
        "logprobs": ([value for each in samples for value in each.logprobs], torch.float64),
        "versions": ([each for sample in samples for each in sample.versions], torch.int64),
        "lengths": ([len(each.tokens) for each in samples], torch.int64),
        "rewards": (group.rewards, torch.float64),
    }
    rows = {name: torch.tensor([column], dtype=kind) for name, (column, kind) in columns.items()}
    rows["rest"] = torch.frombuffer(bytearray(pickle.dumps(rest)), dtype=torch.uint8)[None]
    return tensordict.TensorDict(rows, batch_size=[1])


def _group(row: Mapping[str, Any]) -> RolloutGroup:
    rest = pickle.loads(row["rest"].contiguous().numpy().tobytes())
    tokens, logprobs, versions, lengths, rewards = (row[name].tolist() for name in FIELDS[:5])
    samples = []
    told = zip(rest["ids"], rest["reasons"], rest["routes"], lengths, strict=True)
    for request_id, reason, routes, length in told:
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
        id=rest["id"],
        prompt=rest["prompt"],
        samples=tuple(samples),
        rewards=tuple(rewards),
        failed=rest["failed"],
    )
