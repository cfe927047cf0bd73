"""Makes the engines of a run, samples with them, and brings them new weights."""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import (
    broadcast,
    broadcast_object_list,
    gather_object,
    get_global_rank,
    get_rank,
    get_world_size,
    scatter_object_list,
)

from megatron_idempotent.rl.controller import Fleet
from megatron_idempotent.rl.engines import Request, RolloutEngine, Sample
from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.hf import Architecture
from megatron_idempotent.rl.sync import RemoteWeights, SyncSettings, follow
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightSource
from megatron_idempotent.rl.weights.transports import (
    BucketSender,
    CudaIpcSender,
    DiskSender,
    ProcessGroupSender,
    Sender,
    SharedMemorySender,
)
from megatron_idempotent.rl.weights.transports.shared_memory import DIRECTORY

from .config import Config
from .output import SYNC
from .policy import MegatronPolicy


class Engines:
    """Answers this rank's requests with the run's engines, and brings them new weights.

    Example: `engines.publish(version=0); samples = engines.generate(requests)`.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        source: WeightSource,
        config: Config,
        *,
        shared: bool,
    ) -> None:
        """
        Args:
            engines: the engines that this rank speaks with; empty on other ranks than 0 if shared.
            source: reads the trainer's weights.
            config: has the limits of a publish and of a request.
            shared: True if rank 0 samples for all ranks.
        """
        # One loop for the whole run: connections and locks of engines belong to theirs.
        self._runner = asyncio.Runner()
        self._engines, self._source, self._shared = tuple(engines), source, shared
        self._settings = sync_settings(config)
        self._request_timeout_s = config.rollout.request_timeout_s
        self._fleet: Fleet | None = None
        if engines:
            # Asked for samples alone: the loop makes groups of them, on each rank.
            groups: Any = None
            self._fleet = Fleet(
                engines,
                source=source,
                requests=groups,
                score=groups,
                settings=self._settings,
                deltas=config.sync.deltas,
            )

    def publish(self, version: int) -> Mapping[str, float]:
        """Bring the current weights to all engines, as `version`; collective if they are shared.

        Engines that could not be updated, or are quarantined, get no requests. Returns metrics of
        this rank's engines. Errors: those of `Fleet.publish`.
        """
        if self._fleet is not None:
            return self._runner.run(self._fleet.publish(version))
        follow(self._source, settings=self._settings)
        return {}

    def generate(self, requests: Sequence[Request]) -> Sequence[Sample]:
        """Draw a sample for each request, in their order; collective if engines are shared.

        `publish` must have been called. Errors: those of `Fleet.sample`; `TimeoutError`
        after `request_timeout_s`.
        """
        if not self._shared:
            return self._generate(requests)
        # Small objects of our own; the ranks are processes of one program.
        asked: list[Any] = [None] * get_world_size()
        gather_object(tuple(requests), asked if get_rank() == 0 else None)
        answers: list[Any] = []
        if get_rank() == 0:
            samples = iter(self._generate([request for part in asked for request in part]))
            answers = [[next(samples) for _ in part] for part in asked]
        mine: list[Any] = [None]
        scatter_object_list(mine, answers or None)
        found: Sequence[Sample] = mine[0]
        return found

    def close(self) -> None:
        """Close all engines, and the event loop that they run in."""
        with self._runner:
            if self._fleet is not None:
                self._runner.run(self._fleet.close())

    def _generate(self, requests: Sequence[Request]) -> list[Sample]:
        fleet = self._fleet
        assert fleet is not None

        async def one(request: Request) -> Sample:
            async with asyncio.timeout(self._request_timeout_s):
                return await fleet.sample(request)

        async def all_of_them() -> list[Sample]:
            return await asyncio.gather(*map(one, requests))

        return self._runner.run(all_of_them())


class SpreadWeights:
    """Implements `WeightSource` for all ranks of a group, from a source for its first rank alone.

    So each rank can have an engine of its own. Example: `SpreadWeights(weights, group)`.
    """

    def __init__(self, source: WeightSource, group: Any) -> None:
        """Take a source that is collective in `group`; None is the default group."""
        self._source, self._group = source, group

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return name, shape and type of all tensors; see `WeightSource.tensors`."""
        return self._source.tensors()

    def buckets(self, *, bucket_bytes: int) -> SpreadBuckets:
        """Iterate over buckets with all tensors, on every rank; see `WeightSource.buckets`."""
        return SpreadBuckets(
            self._source.buckets(bucket_bytes=bucket_bytes), self.tensors(), self._group
        )


class SpreadBuckets(Iterator[Bucket]):
    """Broadcasts the buckets of a source to all ranks of a group. Example: `next(buckets)`."""

    def __init__(self, buckets: Iterator[Bucket], infos: Sequence[TensorInfo], group: Any) -> None:
        self._buckets, self._group = buckets, group
        self._infos = {info.name: info for info in infos}
        self._first = 0 if group is None else get_global_rank(group, 0)
        self._ended = False

    def __next__(self) -> Bucket:
        if self._ended:
            raise StopIteration
        # Until it has come back: a collective that failed is not entered again.
        self._ended = True
        bucket = next(self._buckets, None)
        if bucket is None:
            raise StopIteration
        told: list[Any] = [dict(bucket.checksums)]
        broadcast_object_list(told, self._first, group=self._group)
        checksums: dict[str, int] = told[0]
        tensors = dict(bucket.tensors)
        for name in checksums:
            if name not in tensors:
                info = self._infos[name]
                tensors[name] = torch.empty(info.shape, dtype=info.dtype, device="cuda")
            # As bytes: backends do not take all types.
            bytes_N = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            broadcast(bytes_N, self._first, group=self._group)
        self._ended = False
        return Bucket(index=bucket.index, tensors=tensors, checksums=checksums)

    def close(self) -> None:
        """Receive the buckets that are left, so that other ranks can end; may be called twice."""
        for _ in self:
            pass


def sync_settings(config: Config) -> SyncSettings:
    """Return the limits of a publish."""
    return SyncSettings(bucket_bytes=config.sync.bucket_mb << 20)


def make_engines(config: Config, policy: MegatronPolicy, checkpoint: Path, out: Path) -> Engines:
    """Make an engine on every rank, or connect rank 0 to servers for all ranks. Collective.

    `checkpoint` is the Hugging Face one that the weights are from; `out` the output directory.
    """
    if config.rollout.engine != "transformers":
        servers = server_engines(config, checkpoint, out) if get_rank() == 0 else ()
        source = policy.source(deltas=config.sync.deltas)
        return Engines(servers, source, config, shared=True)
    # The CPU runtime, where it is on, puts "cuda" on the CPU.
    device = None if config.run.device == "cpu" else "cuda"
    engine = _transformers(config, checkpoint, name=f"rank-{get_rank()}", device=device)
    # All tensors, on every rank: they come from the ranks of its replica or, if experts are spread
    # over replicas, from all ranks. Where they are spread, each rank finds what has changed.
    group = None if config.parallel.ep > 1 else policy.replica.group
    alone = get_world_size(group) == 1
    weights = policy.source(group, deltas=alone and config.sync.deltas)
    source = weights if alone else SpreadWeights(weights, group)
    return Engines([engine], source, config, shared=False)


def _transformers(
    config: Config, checkpoint: Path, *, name: str, device: str | None
) -> RolloutEngine:
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    routed = config.rollout.router_replay != "off"
    return TransformersEngine(checkpoint, name=name, device=device, routed_experts=routed)


def server_engines(
    config: Config,
    checkpoint: Path,
    out: Path,
    on_ranks: Callable[[Callable[[], Sender]], Sender] | None = None,
) -> Sequence[RolloutEngine]:
    """Make engines of the vLLM servers at `rollout.engine_url`.

    `on_ranks` makes a sender whose work is done on the ranks; None for one of this process.
    """
    from megatron_idempotent.rl.engines.vllm import VllmEngine

    own = config.sync.directory
    directory = Path(own) if own else (out / SYNC).absolute()
    if not own:  # what a run that died was sending: whole models
        shutil.rmtree(directory, ignore_errors=True)
    urls = [url.strip() for url in config.rollout.engine_url.split(",") if url.strip()]
    routing = routing_layers(config, checkpoint)
    make = functools.partial(make_sender, config, directory)
    transport = make if on_ranks is None else functools.partial(on_ranks, make)
    return [VllmEngine(url, transport=transport, routing_layers=routing) for url in urls]


def routing_layers(config: Config, checkpoint: Path) -> Sequence[int]:
    """Return the layers whose experts samples are to bring."""
    off = config.rollout.router_replay == "off"
    return () if off else range(Architecture.read(checkpoint).layers)


def make_sender(config: Config, directory: Path) -> Sender:
    """Make the sender that the configuration asks for, where the weights are."""
    sync = config.sync
    if sync.transport == "bucket":
        return BucketSender(sync.directory or str(directory))
    if sync.transport == "disk":
        return DiskSender(directory)
    if sync.transport == "shared_memory":
        return SharedMemorySender()
    if sync.transport == "cuda_ipc":
        return CudaIpcSender()
    return ProcessGroupSender(
        sync.address or "127.0.0.1",
        ranks=sync.workers,
        backend="nccl" if sync.transport == "nccl" else "gloo",
    )


def files_sender(out: Path) -> Callable[[], Sender]:
    """Return what makes a sender through files of the output directory, for any process."""
    return functools.partial(DiskSender, (out / SYNC).absolute())


async def make_async_engines(
    config: Config, checkpoint: Path, out: Path, weights: RemoteWeights
) -> Sequence[RolloutEngine]:
    """Make the engines of an asynchronous run: servers, or models in this process.

    `checkpoint` is the Hugging Face one from which they load a model; the policy's weights come
    with the first publish, from the ranks that `weights` speaks with.
    """
    if config.rollout.engine_url:
        return server_engines(config, checkpoint, out, weights.sender)
    names = [f"engine-{number}" for number in range(config.controller.engines)]
    if config.controller.cluster == "ray":
        engines = _ray_engines(config, checkpoint, names, out, weights)
        await asyncio.gather(*(engine.ready() for engine in engines))
        return engines
    from transformers.utils import logging

    # Of loading a checkpoint: it would be drawn into the middle of the live table.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # No runtime is on in this process: "cuda" is a GPU.
    device = "cuda" if config.run.device == "cuda" else None
    return [
        await asyncio.to_thread(_transformers, config, checkpoint, name=name, device=device)
        for name in names
    ]


def _in_actor(config: Config, checkpoint: Path, out: Path, name: str) -> RolloutEngine:
    """Make the engine of an actor: a model in its process, or a vLLM server of its own."""
    gpus = config.controller.gpus_per_engine
    if config.rollout.engine == "transformers":
        return _transformers(config, checkpoint, name=name, device="cuda" if gpus else None)
    from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, VllmServer
    from megatron_idempotent.rl.engines.vllm_served import ServedVllm

    arguments = shlex.split(config.rollout.vllm_arguments)
    routing = routing_layers(config, checkpoint)
    if routing:
        arguments.append("--enable-return-routed-experts")
    if gpus > 1:
        arguments += ["--tensor-parallel-size", str(gpus)]
    server = VllmServer(
        checkpoint,
        python=config.rollout.vllm_python or sys.executable,
        arguments=arguments,
        environment=None if gpus else CPU_ENVIRONMENT,
    )
    transport = SharedMemorySender if has_room(config) else files_sender(out)
    return ServedVllm(server, name=name, transport=transport, routing_layers=routing)


def has_room(config: Config) -> bool:
    """Return whether shared memory of this machine takes the two buckets of an update."""
    if not DIRECTORY.is_dir():  # as on macOS
        return False
    free = os.statvfs(DIRECTORY)
    # A container has 64 MB, unless it was given more: too little for two buckets of most models.
    return free.f_bavail * free.f_frsize >= 2 * (config.sync.bucket_mb << 20)


def _ray_engines(
    config: Config, checkpoint: Path, names: Sequence[str], out: Path, weights: RemoteWeights
) -> Sequence[RayEngine]:
    """Make engines in actors of the cluster, to which ranks send weights through files of `out`.

    Paths are made absolute: actors run in other folders.
    """
    controller = config.controller
    return [
        RayEngine(
            name,
            functools.partial(_in_actor, config, checkpoint.absolute(), out.absolute(), name),
            transport=functools.partial(weights.sender, files_sender(out)),
            num_cpus=controller.cpus_per_engine,
            num_gpus=controller.gpus_per_engine,
        )
        for name in names
    ]
