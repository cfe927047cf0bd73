"""The engines that the configuration names, for this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_idempotent.rollout import RolloutEngine
from megatron_idempotent.sync import SyncSettings
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.policy.megatron import MegatronPolicy
from megatron_idempotent.trainer.rollout.engines import Engines
from megatron_idempotent.weights.transports import (
    CudaIpcSender,
    DiskSender,
    ProcessGroupSender,
    Sender,
    SharedMemorySender,
)

MB = 1 << 20


def make_engines(config: Config, policy: MegatronPolicy, checkpoint: Path, out: Path) -> Engines:
    """An engine on every rank, or servers that rank 0 speaks with. Collective."""
    shared = config.rollout.engine != "transformers"
    engines: Sequence[RolloutEngine] = ()
    if not shared or dist.get_rank() == 0:
        engines = _MAKERS[config.rollout.engine](config, checkpoint, out)
    return Engines(
        engines,
        policy.source(shared=shared),
        shared=shared,
        settings=SyncSettings(bucket_bytes=config.sync.bucket_mb * MB),
        changed_only=config.sync.changed_only,
        request_timeout_s=config.rollout.request_timeout_s,
    )


def server_engines(config: Config, checkpoint: Path, out: Path) -> Sequence[RolloutEngine]:
    """The servers of vLLM or SGLang at `rollout.engine_url`."""
    return _MAKERS[config.rollout.engine](config, checkpoint, out)


def _transformers(config: Config, checkpoint: Path, out: Path) -> Sequence[RolloutEngine]:
    from megatron_idempotent.rollout.local import TransformersEngine

    name = f"rank-{dist.get_rank()}"
    return [TransformersEngine(checkpoint, name=name, device=_device(config))]


def _device(config: Config) -> str | None:
    return None if config.run.device == "cpu" else "cuda"


def _vllm(config: Config, checkpoint: Path, out: Path) -> Sequence[RolloutEngine]:
    from megatron_idempotent.rollout.vllm import VllmEngine

    directory = _directory(config, out)
    return [VllmEngine(url, transport=lambda: _sender(config, directory)) for url in _urls(config)]


def _sglang(config: Config, checkpoint: Path, out: Path) -> Sequence[RolloutEngine]:
    from megatron_idempotent.rollout.sglang import SglangEngine

    directory = _directory(config, out)
    return [SglangEngine(url, checkpoint=checkpoint, directory=directory) for url in _urls(config)]


def _sender(config: Config, directory: Path) -> Sender:
    sync = config.sync
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


def _directory(config: Config, out: Path) -> Path:
    return Path(config.sync.directory) if config.sync.directory else (out / "sync").absolute()


def _urls(config: Config) -> list[str]:
    return [url.strip() for url in config.rollout.engine_url.split(",") if url.strip()]


_MAKERS: dict[str, Callable[[Config, Path, Path], Sequence[RolloutEngine]]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}
