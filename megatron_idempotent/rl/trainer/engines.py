"""Makes the engines of a run, samples with them, and updates their weights."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported by name: if a function refers to `torch.distributed` and to a name `config`, cloudpickle
# tries to pickle the module `torch.distributed.config`, and fails.
from torch.distributed import get_rank, get_world_size

from megatron_idempotent.rl.controller import Fleet
from megatron_idempotent.rl.engines import Request, RolloutEngine, Sample
from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.hf import Architecture
from megatron_idempotent.rl.sync import RemoteWeights, SyncSettings, follow
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightSource, transports
from megatron_idempotent.rl.weights.transports import Sender
from megatron_idempotent.rl.weights.transports.shared_memory import DIRECTORY

from .config import Config
from .output import SYNC, Job
from .policy import MegatronPolicy


class Engines:
    """Samples responses to this rank's requests with the run's inference engines, and sends new
    weights to the engines.

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
        """Take the engines, and make the event loop that they run in.

        Args:
            engines: the engines that this rank calls; if shared, empty on all ranks except 0.
            source: exports the trainer's weights.
            config: the configuration, with the limits of publishes and requests.
            shared: True if rank 0 samples for all ranks.
        """
        # One event loop for the entire run, because engines' connections and locks are bound to it.
        self._runner = asyncio.Runner()
        self._engines, self._source, self._shared = tuple(engines), source, shared
        self._request_timeout_s = config.rollout.request_timeout_s
        self._settings = SyncSettings(bucket_bytes=config.sync.bucket_bytes)
        self._fleet: Fleet | None = None
        if engines:
            # Used for single samples only: each rank makes groups itself.
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
        """Send the current weights, as `version`, to the run's engines. All ranks that take part in
        the export of weights call it.

        Engines that could not be updated get no requests. Returns metrics of this rank's engines.

        Raises:
            EnginesLost: no engine took the weights.
        """
        if self._fleet is not None:
            return self._runner.run(self._fleet.publish(version))
        follow(self._source, settings=self._settings)
        return {}

    def generate(self, requests: Sequence[Request]) -> Sequence[Sample]:
        """Return a sample for each request, in order; a collective if rank 0 samples for all ranks.

        `publish` must have been called.

        Raises:
            TimeoutError: a request took longer than `request_timeout_s`.
            Exception: as in `Fleet.sample`.
        """
        if not self._shared:
            return self._generate(requests)
        # Pickled objects are safe: all ranks are processes of one program.
        requests_of_ranks: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        )
        dist.gather_object(tuple(requests), requests_of_ranks)
        answers: list[Any] | None = None
        if requests_of_ranks is not None:
            samples = iter(self._generate(list(itertools.chain(*requests_of_ranks))))
            answers = [[next(samples) for _ in part] for part in requests_of_ranks]
        own_samples: list[Any] = [None]
        dist.scatter_object_list(own_samples, answers)
        samples_here: Sequence[Sample] = own_samples[0]
        return samples_here

    def close(self) -> None:
        """Close all engines and their event loop."""
        with self._runner:
            if self._fleet is not None:
                self._runner.run(self._fleet.close())

    def _generate(self, requests: Sequence[Request]) -> list[Sample]:
        fleet = self._fleet
        assert fleet is not None

        async def sample_one(request: Request) -> Sample:
            async with asyncio.timeout(self._request_timeout_s):
                return await fleet.sample(request)

        async def all_of_them() -> list[Sample]:
            return await asyncio.gather(*map(sample_one, requests))

        return self._runner.run(all_of_them())


class SpreadWeights:
    """A `WeightSource` that broadcasts the tensors of another source to all ranks of a group, not
    only to the first.

    It lets every rank have an engine. Example: `SpreadWeights(weights, group)`.
    """

    def __init__(self, source: WeightSource, group: Any) -> None:
        """Take a source whose methods are collectives of `group`; None is the default group."""
        self._source, self._group = source, group

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return name, shape and dtype of all tensors, in the order in which they are sent; see
        `WeightSource.tensors`.
        """
        return self._source.tensors()

    def buckets(self, *, bucket_bytes: int) -> SpreadBuckets:
        """Return an iterator over the buckets of all tensors, complete on every rank; see
        `WeightSource.buckets`.
        """
        return SpreadBuckets(
            self._source.buckets(bucket_bytes=bucket_bytes), self.tensors(), self._group
        )


class SpreadBuckets(Iterator[Bucket]):
    """Broadcasts the buckets of a source from a group's first rank to all its ranks. Example:
    `next(buckets)`.
    """

    def __init__(self, buckets: Iterator[Bucket], infos: Sequence[TensorInfo], group: Any) -> None:
        self._buckets, self._group = buckets, group
        self._infos = {info.name: info for info in infos}
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self._ended = False

    def __next__(self) -> Bucket:
        if self._ended:
            raise StopIteration
        # Reset after success: after a failed collective, no other one is entered.
        self._ended = True
        bucket = next(self._buckets, None)
        if bucket is None:
            raise StopIteration
        message: list[Any] = [dict(bucket.checksums)]
        dist.broadcast_object_list(message, self._first, group=self._group)
        checksums: dict[str, int] = message[0]
        tensors = dict(bucket.tensors)
        for name in checksums:
            if name not in tensors:
                info = self._infos[name]
                tensors[name] = torch.empty(info.shape, dtype=info.dtype, device="cuda")
            # As bytes: backends do not support all dtypes.
            bytes_N = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(bytes_N, self._first, group=self._group)
        self._ended = False
        return Bucket(index=bucket.index, tensors=tensors, checksums=checksums)

    def close(self) -> None:
        """Take part in broadcasts of the remaining buckets, so that other ranks can finish."""
        for _ in self:
            pass


def make_engines(job: Job, policy: MegatronPolicy) -> Engines:
    """Return this rank's `Engines`. Without vLLM, each rank has one engine, a model in its process.
    With vLLM, only rank 0 has engines, which are clients of the servers, and samples for all ranks.
    A collective.
    """
    config = job.config
    if config.rollout.engine != "transformers":
        servers = server_engines(job, policy.checkpoint) if get_rank() == 0 else ()
        source = policy.source(deltas=config.sync.deltas)
        return Engines(servers, source, config, shared=True)
    # With the CPU runtime, "cuda" is the CPU.
    device = None if config.run.device == "cpu" else "cuda"
    name = f"rank-{get_rank()}"
    engine = _transformers(config, policy.checkpoint, name=name, device=device)
    # Every rank gets all tensors, from the ranks of its replica or, if experts are spread over
    # replicas, from all ranks. Deltas only if a rank has them all itself.
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
    job: Job,
    checkpoint: Path,
    on_ranks: Callable[[Callable[[], Sender]], Sender] | None = None,
) -> Sequence[RolloutEngine]:
    """Return, for each vLLM server in `rollout.engine_url`, an engine that is a client of the
    server.

    `on_ranks` makes a sender that sends from the ranks; None to send from this process.
    """
    from megatron_idempotent.rl.engines.vllm import VllmEngine

    config, configured = job.config, job.config.sync.directory
    directory = Path(configured) if configured else (job.out / SYNC).absolute()
    if not configured:  # leftovers of a run that died: whole models
        shutil.rmtree(directory, ignore_errors=True)
    urls = [url.strip() for url in config.rollout.engine_url.split(",") if url.strip()]
    routing = routing_layers(config, checkpoint)
    make = functools.partial(make_sender, config, directory)
    transport = make if on_ranks is None else functools.partial(on_ranks, make)
    return [VllmEngine(url, transport=transport, routing_layers=routing) for url in urls]


def routing_layers(config: Config, checkpoint: Path) -> Sequence[int]:
    """Return the indices of the layers whose selected experts each sample must include: all layers,
    or none if `rollout.router_replay` is "off".
    """
    off = config.rollout.router_replay == "off"
    return () if off else range(Architecture.read(checkpoint).layers)


def make_sender(config: Config, directory: Path) -> Sender:
    """Make the weight sender that `sync.transport` names; called in the process that has the
    weights.
    """
    sync = config.sync
    match sync.transport:
        case "bucket":
            return transports.BucketSender(sync.directory or str(directory))
        case "disk":
            return transports.DiskSender(directory)
        case "shared_memory":
            return transports.SharedMemorySender()
        case "cuda_ipc":
            return transports.CudaIpcSender()
        case backend:
            address = sync.address or "127.0.0.1"
            return transports.ProcessGroupSender(address, ranks=sync.workers, backend=backend)


def files_sender(out: Path) -> Callable[[], Sender]:
    """Return a factory of weight senders that write to files in the output directory; any process
    can call the factory.
    """
    return functools.partial(transports.DiskSender, (out / SYNC).absolute())


async def make_async_engines(job: Job, weights: RemoteWeights) -> Sequence[RolloutEngine]:
    """Make the engines of an asynchronous run: clients of the servers in `rollout.engine_url`,
    engines in Ray actors, or models in this process.

    They load a model from the job's initial checkpoint; the first publish updates them to the
    policy's weights, from the ranks of `weights`.
    """
    config = job.config
    if config.rollout.engine_url:
        return server_engines(job, job.checkpoint, weights.sender)
    names = [f"engine-{number}" for number in range(config.controller.engines)]
    if config.controller.cluster == "ray":
        engines = _ray_engines(job, names, weights)
        await asyncio.gather(*(engine.ready() for engine in engines))
        return engines
    from transformers.utils import logging

    # The progress bar of loading would disturb the live table.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # This process has no CPU runtime: "cuda" is a GPU.
    device = "cuda" if config.run.device == "cuda" else None
    return [
        await asyncio.to_thread(_transformers, config, job.checkpoint, name=name, device=device)
        for name in names
    ]


def _in_actor(job: Job, checkpoint: Path, name: str) -> RolloutEngine:
    """Make an inference engine in the Ray actor that calls this function: a model in the actor's
    process, or a vLLM server that the actor starts.
    """
    config, gpus = job.config, job.config.controller.gpus_per_engine
    if config.rollout.engine == "transformers":
        return _transformers(config, checkpoint, name=name, device="cuda" if gpus else None)
    from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, ServedVllm, VllmServer

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
    return ServedVllm(server, name=name, transport=local_sender(job), routing_layers=routing)


def local_sender(job: Job) -> Callable[[], Sender]:
    """Return a factory of senders that send weights to receivers on this machine: through shared
    memory if it has room for two buckets, else through files.
    """
    files = files_sender(job.out)
    if not DIRECTORY.is_dir():  # as on macOS
        return files
    free = os.statvfs(DIRECTORY)
    # By default a container has 64 MB, too little for two buckets of most models.
    has_room = free.f_bavail * free.f_frsize >= 2 * job.config.sync.bucket_bytes
    return transports.SharedMemorySender if has_room else files


def _ray_engines(job: Job, names: Sequence[str], weights: RemoteWeights) -> Sequence[RayEngine]:
    """Make engines in actors of the Ray cluster; they receive weights through files in the output
    directory.

    Paths are made absolute, because actors run in other folders.
    """
    controller = job.config.controller
    actor_job = dataclasses.replace(job, out=job.out.absolute())
    return [
        RayEngine(
            name,
            functools.partial(_in_actor, actor_job, job.checkpoint.absolute(), name),
            transport=functools.partial(weights.sender, files_sender(job.out)),
            num_cpus=controller.cpus_per_engine,
            num_gpus=controller.gpus_per_engine,
        )
        for name in names
    ]
