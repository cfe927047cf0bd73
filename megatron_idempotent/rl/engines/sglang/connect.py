"""Connects to a server, and keeps what it said of itself."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from megatron_idempotent.rl.weights import TensorInfo
from megatron_idempotent.rl.weights.safetensors_io import Checkpoint

from .api import Api
from .facts import Facts, ServerMemory, learn
from .requests import Requests, parsed_version
from .updates import DiskUpdates, read_vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Holds the arguments of `SglangEngine` that its parts need."""

    checkpoint: Path
    directory: Path
    server_directory: str
    expected: tuple[TensorInfo, ...] | None
    initial_version: int
    seeds: bool
    load_timeout_s: float
    health_timeout_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Connected:
    """Holds the parts of an engine. Example: `(await connect(api, settings)).facts.spans`."""

    facts: Facts
    requests: Requests
    updates: DiskUpdates
    memory: ServerMemory


async def connect(api: Api, settings: ServerSettings) -> Connected:
    """Ask a server for its abilities, and give its weights a version if they have none.

    Errors: `EngineUnsupported`; `ValueError` for a checkpoint that cannot be read.
    """
    facts = await learn(api)
    expected = settings.expected
    if expected is None:
        checkpoint = await asyncio.to_thread(Checkpoint, settings.checkpoint)
        expected = tuple(checkpoint.tensors.values())
        checkpoint.close()
    vocabulary = await asyncio.to_thread(read_vocabulary, settings.checkpoint)
    version = parsed_version(facts.weight_version)
    if version is None:
        version = settings.initial_version
        body = {"new_version": str(version), "abort_all_requests": False}
        await api.done("POST", "/update_weight_version", body)
    updates = DiskUpdates(
        api,
        facts,
        version=version,
        directory=settings.directory,
        server_directory=settings.server_directory,
        checkpoint=settings.checkpoint,
        expected=expected,
        load_timeout_s=settings.load_timeout_s,
    )
    requests = Requests(
        api,
        facts,
        vocabulary=vocabulary,
        seeds=settings.seeds,
        silence_s=settings.health_timeout_s,
    )
    memory = ServerMemory(api, timeout_s=settings.load_timeout_s)
    return Connected(facts=facts, requests=requests, updates=updates, memory=memory)
